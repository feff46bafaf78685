"""Reads stored frames in batches of whole frames, however the store cuts their bytes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final

from skerry.wire.frames import FrameBatch, FrameReader

# Elements of a batch: what one worker job decodes. 4 MiB of float32, some 600 kB of int4 frames.
BATCH_NUMEL: Final = 2**20


async def frame_batches(pieces: AsyncIterator[bytes], first: int, numel: int) -> AsyncIterator[FrameBatch]:
    """Yields the frames of `pieces`, which must cover `[first, first + numel)` in order; holds one batch at a time.

    Raises:
        FrameError: TRUNCATED, LAYOUT, BAD_HEADER, TOO_LARGE or BOMB, by the frames' headers alone.
    """
    reader = FrameReader(first, numel, batch_numel=BATCH_NUMEL)
    async for piece in pieces:
        for batch in reader.feed(piece):
            yield batch
    for batch in reader.finish():
        yield batch
