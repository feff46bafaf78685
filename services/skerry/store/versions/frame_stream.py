"""A stream of bytes, cut wherever storage cut it, as batches of whole frames that follow one another."""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final

from skerry.wire.errors import FrameError, WireReason
from skerry.wire.frames import HEADER_SIZE, frame_size

# Elements of a batch: what one worker job decodes. 4 MiB of float32, some 600 kB of int4 frames.
BATCH_NUMEL: Final = 2**20
_RANGE: Final = struct.Struct("<8xQI")  # first element and count, in a frame's header


@dataclass(frozen=True)
class FrameBatch:
    """Whole frames that cover `[first, first + numel)` without a gap. Their checksums are for whoever decodes them."""

    first: int
    numel: int
    data: bytes


async def frame_batches(pieces: AsyncIterator[bytes], first: int, numel: int) -> AsyncIterator[FrameBatch]:
    """Yields the frames of `pieces`, which must cover `[first, first + numel)` in order; holds one batch at a time.

    Raises:
        FrameError: TRUNCATED, LAYOUT, BAD_HEADER or TOO_LARGE, by the frames' headers alone.
    """
    cutter = _Cutter(first, first + numel)
    async for piece in pieces:
        for batch in cutter.feed(piece):
            yield batch
    for batch in cutter.finish():
        yield batch


class _Cutter:
    """Collects bytes until they hold whole frames of about `BATCH_NUMEL` elements."""

    def __init__(self, first: int, stop: int) -> None:
        self._buffer = bytearray()
        self._whole = 0  # bytes of the buffer that are whole frames
        self._first = self._at = first  # the batch covers [first, at)
        self._stop = stop

    def feed(self, piece: bytes) -> list[FrameBatch]:
        self._buffer += piece
        batches = []
        while len(self._buffer) - self._whole >= HEADER_SIZE:
            header = bytes(self._buffer[self._whole : self._whole + HEADER_SIZE])
            size = frame_size(header)
            if len(self._buffer) - self._whole < size:
                break
            self._take(header, size)
            if self._at - self._first >= BATCH_NUMEL:
                batches.append(self._cut())
        return batches

    def finish(self) -> list[FrameBatch]:
        if self._at != self._stop or self._whole != len(self._buffer):
            raise FrameError(
                WireReason.TRUNCATED, f"frames end before their range does. expected={self._stop}, actual={self._at}"
            )
        return [self._cut()] if self._whole else []

    def _take(self, header: bytes, size: int) -> None:
        first, numel = _RANGE.unpack_from(header)
        if first != self._at or first + numel > self._stop:
            raise FrameError(
                WireReason.LAYOUT, f"frame out of place. expected_first={self._at}, first={first}, numel={numel}"
            )
        self._whole += size
        self._at += numel

    def _cut(self) -> FrameBatch:
        batch = FrameBatch(self._first, self._at - self._first, bytes(self._buffer[: self._whole]))
        del self._buffer[: self._whole]
        self._whole, self._first = 0, self._at
        return batch
