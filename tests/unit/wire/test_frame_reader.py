"""Frames are cut whole from pieces of any size, and a wrong header is refused before its payload arrives."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skerry.wire import Codec, Compressor, Encoding, FragmentLayout, TensorSpec
from skerry.wire.codecs import HEADER_SIZE
from skerry.wire.errors import FrameError, WireReason
from skerry.wire.frames import FrameReader, encode_frames, parse_header

# One tensor a codec change: many small frames.
LAYOUT = FragmentLayout("f", tuple(TensorSpec(f"t{n}", (8, 4) if n % 2 else (5,)) for n in range(8)))
VALUES = np.linspace(-1, 1, LAYOUT.numel, dtype=np.float32)
FRAMES = list(encode_frames(VALUES, LAYOUT, Encoding(Codec.INT4, block=8, compressor=Compressor.NONE)))
WHOLE = b"".join(FRAMES)
FRAME_NUMELS = [parse_header(frame).numel for frame in FRAMES]


def read(data: bytes, first: int, numel: int) -> None:
    reader = FrameReader(first, numel)
    reader.feed(data)
    reader.finish()


def reason_of(data: bytes, first: int = 0, numel: int = LAYOUT.numel) -> WireReason:
    with pytest.raises(FrameError) as raised:
        read(data, first, numel)
    return raised.value.reason


@given(piece_bytes=st.integers(1, len(WHOLE) + 1), batch_numel=st.integers(1, LAYOUT.numel + 1))
def test_batches_are_whole_frames_however_the_bytes_are_cut(piece_bytes: int, batch_numel: int) -> None:
    reader = FrameReader(0, LAYOUT.numel, batch_numel=batch_numel)
    batches = []
    for start in range(0, len(WHOLE), piece_bytes):
        batches += reader.feed(WHOLE[start : start + piece_bytes])
    reader.finish()
    assert b"".join(batch.data for batch in batches) == WHOLE
    ends = [batch.first + batch.numel for batch in batches]
    assert [batch.first for batch in batches] == [0, *ends[:-1]]
    assert ends[-1] == LAYOUT.numel
    assert all(batch.numel < batch_numel + max(FRAME_NUMELS) for batch in batches)


def test_only_a_frame_that_comes_in_several_pieces_is_copied() -> None:
    reader = FrameReader(0, LAYOUT.numel, batch_numel=LAYOUT.numel)
    middle = sum(map(len, FRAMES[:5])) + HEADER_SIZE + 1
    pieces = WHOLE[:middle], WHOLE[middle:]
    before, torn, after = [batch for piece in pieces for batch in reader.feed(piece)]
    reader.finish()
    for piece, batch in zip(pieces, (before, after), strict=True):
        assert isinstance(batch.data, memoryview)
        assert batch.data.obj is piece
    assert torn.data in FRAMES


def test_each_frame_is_a_batch_by_itself_where_nothing_else_is_asked_for() -> None:
    reader = FrameReader(0, LAYOUT.numel)
    assert [batch.data for batch in reader.feed(WHOLE)] == FRAMES
    reader.finish()


def test_what_does_not_follow_or_ends_early_is_refused() -> None:
    assert reason_of(WHOLE[:-1]) is WireReason.TRUNCATED
    assert reason_of(b"".join(FRAMES[:-1])) is WireReason.TRUNCATED
    assert reason_of(WHOLE + b"x") is WireReason.TRUNCATED
    assert reason_of(FRAMES[0] + FRAMES[2]) is WireReason.LAYOUT
    assert reason_of(FRAMES[0] + FRAMES[0]) is WireReason.LAYOUT
    assert reason_of(WHOLE + FRAMES[-1]) is WireReason.LAYOUT
    assert reason_of(WHOLE, first=1) is WireReason.LAYOUT
    assert reason_of(WHOLE, numel=LAYOUT.numel - 1) is WireReason.LAYOUT


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (b"no frame" * 4, WireReason.BAD_HEADER),
        (FRAMES[1][:HEADER_SIZE], WireReason.LAYOUT),  # not the first frame
        (FRAMES[0][:20] + b"\xff" * 4 + FRAMES[0][24:HEADER_SIZE], WireReason.TOO_LARGE),  # payload size
        (FRAMES[0][:16] + b"\xff" * 4 + FRAMES[0][20:HEADER_SIZE], WireReason.TOO_LARGE),  # element count
        (FRAMES[0][:24] + b"\xff" * 4 + FRAMES[0][28:HEADER_SIZE], WireReason.BOMB),  # raw size
    ],
)
def test_a_wrong_header_is_refused_before_any_of_its_payload_arrives(header: bytes, reason: WireReason) -> None:
    reader = FrameReader(0, LAYOUT.numel)
    reader.feed(header[:-1])
    with pytest.raises(FrameError) as raised:
        reader.feed(header[-1:])
    assert raised.value.reason is reason
