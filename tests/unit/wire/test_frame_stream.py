"""A stream of frames, cut anywhere, comes out as whole frames that follow one another."""

from __future__ import annotations

from collections.abc import AsyncIterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skerry.wire.codecs import MAX_FRAME_NUMEL, Codec, Encoding
from skerry.wire.errors import FrameError, WireReason
from skerry.wire.frames import decode_frames, encode_frames
from skerry_syncer.store.versions.blobs import BATCH_NUMEL, frame_batches
from tests.support.merge_driver import layout_of

LAYOUT = layout_of((900, 3000), (5,))
VALUES = np.random.default_rng(0).normal(size=LAYOUT.numel).astype(np.float32)
FRAMES = list(encode_frames(VALUES, LAYOUT, Encoding(Codec.INT8)))


async def pieces(data: bytes, size: int) -> AsyncIterator[bytes]:
    for start in range(0, len(data), size):
        yield data[start : start + size]


async def reason(data: bytes, first: int, numel: int) -> WireReason:
    with pytest.raises(FrameError) as raised:
        [batch async for batch in frame_batches(pieces(data, 1000), first, numel)]
    return raised.value.reason


@settings(max_examples=10)
@given(size=st.integers(1000, 6_000_000))
async def test_batches_cover_the_range_however_the_stream_is_cut(size: int) -> None:
    batches = [batch async for batch in frame_batches(pieces(b"".join(FRAMES), size), 0, LAYOUT.numel)]
    ends = [batch.first + batch.numel for batch in batches]
    assert [batch.first for batch in batches] == [0, *ends[:-1]]
    assert max(batch.numel for batch in batches) < BATCH_NUMEL + MAX_FRAME_NUMEL
    assert sum(batch.numel for batch in batches) == LAYOUT.numel
    out = np.empty(LAYOUT.numel, np.float32)
    decode_frames(b"".join(batch.data for batch in batches), LAYOUT, out)
    np.testing.assert_allclose(out, VALUES, atol=np.abs(VALUES).max() / 254 * 1.01)


async def test_gaps_ends_and_strangers_are_refused() -> None:
    whole = b"".join(FRAMES)
    assert await reason(whole[:-1], 0, LAYOUT.numel) is WireReason.TRUNCATED
    assert await reason(b"".join(FRAMES[:-1]), 0, LAYOUT.numel) is WireReason.TRUNCATED
    assert await reason(b"", 0, LAYOUT.numel) is WireReason.TRUNCATED
    assert await reason(FRAMES[0] + b"".join(FRAMES[2:]), 0, LAYOUT.numel) is WireReason.LAYOUT
    assert await reason(whole + FRAMES[-1], 0, LAYOUT.numel) is WireReason.LAYOUT
    assert await reason(b"not a frame " * 10, 0, LAYOUT.numel) is WireReason.BAD_HEADER
