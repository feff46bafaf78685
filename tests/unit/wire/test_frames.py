"""Frames: what is encoded comes back bit for bit as the sender was told, and whatever is wrong is refused."""

from __future__ import annotations

import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import zstandard
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from skerry.wire import Codec, Compressor, Encoding, FragmentLayout, NonFiniteError, TensorSpec
from skerry.wire.codecs import HEADER_SIZE, cut_parts
from skerry.wire.errors import FrameError, WireReason
from skerry.wire.frames import (
    Frame,
    FrameReader,
    decode_frame,
    encode_frames,
    parse_frames,
    parse_header,
    raw_bytes,
)
from tests.support.decoding import decode_frames
from tests.unit.wire import slow_codec
from tests.unit.wire.wire_strategies import LARGEST, bits, block_encodings, encodings, fragments

Fragment = tuple[FragmentLayout, NDArray[np.float32]]
LAYOUT = FragmentLayout("f", (TensorSpec("a", (4, 10)), TensorSpec("b", (3, 8))))
# One tensor a codec change: many small frames.
MANY = FragmentLayout("f", tuple(TensorSpec(f"t{n}", (8, 4) if n % 2 else (5,)) for n in range(8)))
VALUES = np.linspace(-1, 1, MANY.numel, dtype=np.float32)
FRAMES = list(encode_frames(VALUES, MANY, Encoding(Codec.INT4, block=8, compressor=Compressor.NONE)))
WHOLE = b"".join(FRAMES)
FRAME_NUMELS = [parse_header(frame).numel for frame in FRAMES]


@given(fragments(), encodings)
def test_the_sender_is_told_bit_for_bit_what_the_receiver_decodes(fragment: Fragment, encoding: Encoding) -> None:
    layout, values = fragment
    told, received = np.full_like(values, np.nan), np.full_like(values, np.nan)
    sent_digest = blake3()
    buffer = b"".join(encode_frames(values, layout, encoding, decoded=told, digest=sent_digest))
    decode_frames(buffer, layout, received)
    assert (bits(told) == bits(received)).all()
    frames = list(parse_frames(buffer))
    assert sent_digest.digest() == blake3(b"".join(raw_bytes(frame) for frame in frames)).digest()
    assert (bits(np.concatenate([decode_frame(frame, layout) for frame in frames])) == bits(told)).all()


@given(fragments(), encodings)
def test_a_difference_is_encoded_as_if_it_had_been_taken_before(fragment: Fragment, encoding: Encoding) -> None:
    layout, base = fragment
    values = base * np.float32(0.5)
    told, again = np.empty_like(values), values.copy()
    expected = list(encode_frames(base - values, layout, encoding, decoded=told))
    assert list(encode_frames(values, layout, encoding, base=base)) == expected
    assert list(encode_frames(again, layout, encoding, base=base, decoded=again)) == expected
    assert (bits(again) == bits(told)).all()


@given(fragments(), block_encodings)
def test_the_bytes_are_those_of_the_specification(fragment: Fragment, encoding: Encoding) -> None:
    layout, values = fragment
    tensors = [(offset, tensor.numel) for offset, tensor in zip(layout.offsets, layout.tensors, strict=True)]
    told = np.empty_like(values)
    buffer = b"".join(encode_frames(values, layout, encoding, decoded=told))
    for frame in slow_codec.frames(buffer):
        inside = slice(frame.first, frame.first + frame.numel)
        lengths = list(slow_codec.block_lengths(tensors, frame.first, frame.numel, frame.block))
        exact = [slow_codec.from_bits(int(pattern)) for pattern in bits(values[inside])]
        assert frame.raw == slow_codec.quantise(exact, frame.codec, lengths)
        assert slow_codec.dequantise(frame, lengths) == bits(told[inside]).tolist()


@given(fragments(), encodings, st.integers(1, 600))
def test_parts_encoded_apart_decode_to_the_same_values(fragment: Fragment, encoding: Encoding, size: int) -> None:
    layout, values = fragment
    whole, parts = np.empty_like(values), np.empty_like(values)
    decode_frames(b"".join(encode_frames(values, layout, encoding)), layout, whole)
    end = 0
    for first, numel in cut_parts(layout, encoding, size):
        assert first == end
        end = first + numel
        part = values[first:end]
        frames = b"".join(encode_frames(part, layout, encoding, first=first))
        decode_frames(frames, layout, parts[first:end], first=first)
        assert len(frames) <= size or numel <= encoding.block
    assert end == layout.numel
    assert (bits(whole) == bits(parts)).all()


def test_a_frame_is_as_full_as_blocks_allow_and_never_mixes_codecs() -> None:
    layout = FragmentLayout("f", (TensorSpec("a", (2, 200_000)), TensorSpec("b", (9,)), TensorSpec("c", (4, 4))))
    frames = list(
        parse_frames(b"".join(encode_frames(np.zeros(layout.numel, np.float32), layout, Encoding(Codec.INT4))))
    )
    assert [(frame.codec, frame.first, frame.numel) for frame in frames] == [
        (Codec.INT4, 0, 2**18),
        (Codec.INT4, 2**18, 400_000 - 2**18),
        (Codec.FLOAT32, 400_000, 9),
        (Codec.INT4, 400_009, 16),
    ]


def test_bytes_that_do_not_shrink_are_stored_as_they_are() -> None:
    layout = FragmentLayout("f", (TensorSpec("a", (64, 64)),))
    noise = np.random.default_rng(0).uniform(-1, 1, 4096).astype(np.float32)

    def compressor(values: NDArray[np.float32], codec: Codec) -> Compressor:
        (frame,) = parse_frames(b"".join(encode_frames(values, layout, Encoding(codec))))
        return frame.compressor

    assert compressor(noise, Codec.INT8) is Compressor.NONE
    assert compressor(np.zeros(4096, np.float32), Codec.INT8) is Compressor.ZSTD
    assert compressor(np.zeros(4096, np.float32), Codec.FLOAT32) is Compressor.NONE, "it is never worth it"


def test_an_empty_range_is_no_frames() -> None:
    layout = FragmentLayout("f", (TensorSpec("a", (0, 3)), TensorSpec("b", (0,))))
    empty = np.empty(0, np.float32)
    assert list(encode_frames(empty, layout, Encoding(Codec.INT4))) == []
    decode_frames(b"", layout, empty)


@pytest.mark.parametrize("codec", Codec)
@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_a_value_that_is_not_finite_is_refused_by_its_tensors_name(codec: Codec, bad: float) -> None:
    layout = FragmentLayout("f", (TensorSpec("t0", (9, 40)), TensorSpec("t1", (3, 50)), TensorSpec("t2", (60,))))
    for index, element in ((0, 0), (1, 149), (2, 3)):
        values = np.ones(layout.numel, np.float32)
        values[layout.offsets[index] + element] = bad
        with pytest.raises(NonFiniteError, match=f"tensor=t{index}, element={element}"):
            list(encode_frames(values, layout, Encoding(codec, block=16)))


@pytest.mark.parametrize("codec", [Codec.INT8, Codec.INT4])
def test_a_magnitude_that_would_overflow_is_refused(codec: Codec) -> None:
    layout = FragmentLayout("f", (TensorSpec("a", (1, 3)),))
    values = np.array([1, -LARGEST, 1], np.float32)
    list(encode_frames(values, layout, Encoding(codec)))
    with pytest.raises(NonFiniteError, match="tensor=a, element=1"):
        list(encode_frames(np.nextafter(values, np.float32(-np.inf)), layout, Encoding(codec)))


def test_arguments_that_do_not_fit_are_refused_at_once() -> None:
    layout = FragmentLayout("f", (TensorSpec("a", (2, 50)), TensorSpec("b", (10,))))
    values = np.zeros(110, np.float32)
    wrongs: list[tuple[Any, dict[str, Any], str]] = [
        (values.astype(np.float64), {}, "float32"),
        (values.reshape(11, 10), {}, "float32"),
        (values, {"first": 1}, "outside"),
        (values[1:], {"first": 1}, "element=1, tensor=a"),
        (values[:17], {}, "element=17"),
        (values, {"decoded": values[:5]}, "decoded"),
        (values, {"base": values[:5]}, "base"),
    ]
    for wrong, options, said in wrongs:
        with pytest.raises(ValueError, match=said):
            encode_frames(wrong, layout, Encoding(Codec.INT4, block=16), **options)
    with pytest.raises(ValueError, match="block"):
        Encoding(Codec.INT4, block=0)


def test_parts_have_the_size_that_was_asked_for() -> None:
    encoding = Encoding(Codec.INT4, compressor=Compressor.NONE)
    layout = FragmentLayout("f", (TensorSpec("a", (3, 900_000)), TensorSpec("b", (700,)), TensorSpec("c", (999, 1000))))
    values = np.random.default_rng(4).standard_normal(layout.numel).astype(np.float32)
    sizes = [
        sum(map(len, encode_frames(values[first : first + numel], layout, encoding, first=first)))
        for first, numel in cut_parts(layout, encoding, 200_000)
    ]
    assert max(sizes) <= 200_000
    assert min(sizes[:-1]) > 0.97 * 200_000


def test_threads_encode_and_decode_beside_one_another() -> None:
    layout = FragmentLayout("f", (TensorSpec("a", (512, 600)),))
    values = np.random.default_rng(3).standard_normal(layout.numel).astype(np.float32)

    def round_trip(codec: Codec) -> tuple[bytes, bytes]:
        out = np.empty_like(values)
        encoded = b"".join(encode_frames(values, layout, Encoding(codec)))
        decode_frames(encoded, layout, out)
        return encoded, out.tobytes()

    jobs = list(Codec) * 4
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(round_trip, jobs)) == [round_trip(codec) for codec in jobs]


def reason_of(buffer: bytes, layout: FragmentLayout = LAYOUT) -> WireReason | None:
    """Return why decoding a buffer is refused; None when it is not."""
    try:
        for frame in parse_frames(buffer):
            decode_frame(frame, layout)
    except FrameError as error:
        return error.reason
    return None


@given(fragments(), encodings, st.data())
def test_any_single_corrupted_byte_is_refused(fragment: Fragment, encoding: Encoding, data: st.DataObject) -> None:
    layout, values = fragment
    buffer = bytearray(b"".join(encode_frames(values, layout, encoding)))
    position = data.draw(st.integers(0, len(buffer) - 1))
    buffer[position] ^= data.draw(st.integers(1, 255))
    with pytest.raises(FrameError):
        decode_frames(buffer, layout, np.empty_like(values))


@given(fragments(), encodings, st.data())
def test_any_truncation_is_refused(fragment: Fragment, encoding: Encoding, data: st.DataObject) -> None:
    layout, values = fragment
    buffer = b"".join(encode_frames(values, layout, encoding))
    cut = buffer[: data.draw(st.integers(0, len(buffer) - 1))]
    with pytest.raises(FrameError) as caught:
        decode_frames(cut, layout, np.empty_like(values))
    assert caught.value.reason is WireReason.TRUNCATED


def test_a_compressed_payload_that_declares_another_size_is_refused_before_it_is_allocated() -> None:
    bomb = zstandard.compress(bytes(2**28), 1)
    assert len(bomb) < 2**18
    frame = Frame(Codec.FLOAT32, Compressor.ZSTD, 0, 0, 40, len(bomb), 160, bomb)
    tracemalloc.start()
    with pytest.raises(FrameError) as caught:
        decode_frame(frame, LAYOUT)
    assert caught.value.reason is WireReason.BOMB
    with pytest.raises(FrameError):
        raw_bytes(frame)
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


def test_a_frame_is_refused_by_a_layout_that_is_not_its_own() -> None:
    values = np.linspace(-1, 1, 64, dtype=np.float32)
    buffer = b"".join(encode_frames(values, LAYOUT, Encoding(Codec.INT4, block=8)))
    other = FragmentLayout("f", (TensorSpec("a", (3, 8)), TensorSpec("b", (4, 10))))
    many = FragmentLayout("f", tuple(TensorSpec(f"t{i}", (1, 1)) for i in range(64)))
    assert reason_of(buffer) is None
    assert reason_of(buffer, many) is WireReason.BOMB
    short = FragmentLayout("f", (TensorSpec("a", (4, 10)),))
    assert reason_of(buffer, short) is WireReason.LAYOUT
    # The same count of blocks in other places can't be told from the frame: the run's layout is agreed before.
    assert reason_of(buffer, other) is None


def reader_reason(data: bytes, first: int = 0, numel: int = MANY.numel) -> WireReason | None:
    reader = FrameReader(first, numel)
    try:
        reader.feed(data)
        reader.finish()
    except FrameError as error:
        return error.reason
    return None


@given(piece_bytes=st.integers(1, len(WHOLE) + 1), batch_numel=st.integers(1, MANY.numel + 1))
def test_batches_are_whole_frames_however_the_bytes_are_cut(piece_bytes: int, batch_numel: int) -> None:
    reader = FrameReader(0, MANY.numel, batch_numel=batch_numel)
    batches = []
    for start in range(0, len(WHOLE), piece_bytes):
        batches += reader.feed(WHOLE[start : start + piece_bytes])
    reader.finish()
    assert b"".join(batch.data for batch in batches) == WHOLE
    ends = [batch.first + batch.numel for batch in batches]
    assert [batch.first for batch in batches] == [0, *ends[:-1]]
    assert ends[-1] == MANY.numel
    assert all(batch.numel < batch_numel + max(FRAME_NUMELS) for batch in batches)


def test_what_does_not_follow_or_ends_early_is_refused() -> None:
    assert reader_reason(b"") is WireReason.TRUNCATED
    assert reader_reason(WHOLE[:-1]) is WireReason.TRUNCATED
    assert reader_reason(b"".join(FRAMES[:-1])) is WireReason.TRUNCATED
    assert reader_reason(WHOLE + b"x") is WireReason.TRUNCATED
    assert reader_reason(FRAMES[0] + FRAMES[2]) is WireReason.LAYOUT
    assert reader_reason(FRAMES[0] + FRAMES[0]) is WireReason.LAYOUT
    assert reader_reason(WHOLE + FRAMES[-1]) is WireReason.LAYOUT
    assert reader_reason(WHOLE, first=1) is WireReason.LAYOUT
    assert reader_reason(WHOLE, numel=MANY.numel - 1) is WireReason.LAYOUT


def test_a_wrong_header_is_refused_before_any_of_its_payload_arrives() -> None:
    header = FRAMES[0][:HEADER_SIZE]
    assert reader_reason(b"no frame" * 4) is WireReason.BAD_HEADER
    assert reader_reason(header[:20] + b"\xff" * 4 + header[24:]) is WireReason.TOO_LARGE  # payload size
    assert reader_reason(header[:24] + b"\xff" * 4 + header[28:]) is WireReason.BOMB  # raw size
