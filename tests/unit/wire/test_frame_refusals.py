"""Bytes from elsewhere: every fault is named, none costs memory, none changes a value unseen."""

from __future__ import annotations

import struct
import tracemalloc
import zlib
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from skerry.wire import Codec, Compressor, Encoding, FragmentLayout, TensorSpec
from skerry.wire.errors import FrameError, WireReason
from skerry.wire.frames import Frame, decode_frame, decode_frames, encode_frames, parse_frames, raw_bytes
from tests.unit.wire.wire_strategies import bits, encodings, fragments

Fragment = tuple[FragmentLayout, NDArray[np.float32]]
LAYOUT = FragmentLayout("f", (TensorSpec("a", (4, 10)), TensorSpec("b", (3, 8))))
HEADER = struct.Struct("<4sBBHQIII")


def make_frame(payload: bytes, **changes: Any) -> bytes:
    """Return a frame with a right checksum whose fields are those of 40 int8 elements, apart from `changes`."""
    fields: dict[str, Any] = {
        "magic": b"SKF1", "codec": 3, "compressor": 0, "block": 8, "first": 0, "numel": 40,
        "payload_size": len(payload), "raw_size": 60,
    } | changes  # fmt: skip
    header = HEADER.pack(*fields.values())
    return header + struct.pack("<I", zlib.crc32(header + payload)) + payload


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


@given(st.binary(max_size=200))
def test_noise_is_refused_or_ignored_but_never_crashes(noise: bytes) -> None:
    assert (reason_of(noise) is None) == (noise == b"")
    assert reason_of(make_frame(noise, compressor=1)) is not None


def test_a_compressed_payload_that_declares_another_size_is_refused_before_it_is_allocated() -> None:
    bomb = zstandard.compress(bytes(2**28), 1)
    assert len(bomb) < 2**18
    frame = Frame(Codec.FLOAT32, Compressor.ZSTD, 0, 0, 40, 160, bomb)
    tracemalloc.start()
    with pytest.raises(FrameError) as caught:
        decode_frame(frame, LAYOUT)
    assert caught.value.reason is WireReason.BOMB
    with pytest.raises(FrameError):
        raw_bytes(frame)
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


def test_the_largest_scales_decode_to_finite_values_whatever_the_code() -> None:
    for codec, top_code in ((Codec.INT8, 127), (Codec.INT4, 7)):
        scale = np.float32(2.0**127) / np.float32(top_code)
        codes = bytes(range(256))
        numel = len(codes) * 8 // codec.bits
        layout = FragmentLayout("f", (TensorSpec("a", (1, numel)),))
        frame = Frame(codec, Compressor.NONE, 2**15, 0, numel, 4 + len(codes), scale.tobytes() + codes)
        assert np.isfinite(decode_frame(frame, layout)).all()


def test_frames_that_leave_a_gap_overlap_or_go_past_the_range_are_refused() -> None:
    values = np.arange(64, dtype=np.float32)
    encoding = Encoding(Codec.INT8, block=8)
    parts = [
        b"".join(encode_frames(values[start:stop], LAYOUT, encoding, first=start))
        for start, stop in ((0, 8), (8, 16), (16, 40), (40, 64))
    ]
    out = np.empty(40, np.float32)
    decode_frames(b"".join(parts[:3]), LAYOUT, out)
    for wrong, reason in (
        (parts[0] + parts[2], WireReason.LAYOUT),
        (parts[0] + parts[0] + parts[2], WireReason.LAYOUT),
        (parts[1] + parts[0] + parts[2], WireReason.LAYOUT),
        (b"".join(parts), WireReason.LAYOUT),
        (parts[0] + parts[1], WireReason.TRUNCATED),
        (b"", WireReason.TRUNCATED),
    ):
        with pytest.raises(FrameError) as caught:
            decode_frames(wrong, LAYOUT, out)
        assert caught.value.reason is reason


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


def test_an_output_of_another_size_is_a_callers_error() -> None:
    (frame,) = parse_frames(make_frame(bytes(60)))
    wrongs: list[Any] = [np.empty(39, np.float32), np.empty(40, np.float64), np.empty(80, np.float32)[::2]]
    for wrong in wrongs:
        with pytest.raises(ValueError, match="out must be"):
            decode_frame(frame, LAYOUT, wrong)


def test_an_output_at_any_offset_receives_the_same_values() -> None:
    values = np.linspace(-1, 1, 64, dtype=np.float32)
    for codec in Codec:
        (frame,) = parse_frames(b"".join(encode_frames(values, LAYOUT, Encoding(codec, block=8))))
        room = np.empty(67, np.float32)
        for offset in range(4):
            decoded = decode_frame(frame, LAYOUT, room[offset : offset + 64])
            assert (bits(decoded) == bits(decode_frame(frame, LAYOUT))).all()
