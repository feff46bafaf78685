"""Cuts a range's frames from bytes that arrive in pieces of any size."""

from __future__ import annotations

from dataclasses import dataclass

from skerry.wire.errors import FrameError, WireReason
from skerry.wire.frames import HEADER_SIZE, parse_header


@dataclass(frozen=True)
class FrameBatch:
    """Whole frames that cover `[first, first + numel)`. Whoever decodes them checks their checksums."""

    first: int
    numel: int
    data: bytes


class FrameReader:
    """Cuts whole frames that must cover a range in order, without a gap or an overlap.

    A header is checked before its payload is kept, so the buffer holds at most a batch, a frame and a piece.
    """

    def __init__(self, first: int, numel: int, *, batch_numel: int = 1) -> None:
        """Expects the range `[first, first + numel)`; a batch has at least `batch_numel` elements, but for the last."""
        self._first = self._at = first  # the next batch begins at `first`; its whole frames so far reach `at`
        self._stop = first + numel
        self._batch_numel = batch_numel
        self._buffer = bytearray()
        self._whole_bytes = 0  # at the front of the buffer: the next batch's whole frames

    def feed(self, piece: bytes) -> list[FrameBatch]:
        """Returns the batches that `piece` completes.

        Raises:
            FrameError: LAYOUT, BAD_HEADER, TOO_LARGE or BOMB, by a header alone.
        """
        self._buffer += piece
        batches = []
        while len(self._buffer) - self._whole_bytes >= HEADER_SIZE:
            header = parse_header(self._buffer[self._whole_bytes : self._whole_bytes + HEADER_SIZE])
            if header.first != self._at or header.first + header.numel > self._stop:
                raise FrameError(
                    WireReason.LAYOUT,
                    f"frame out of place. expected_first={self._at}, range_end={self._stop}, "
                    f"first={header.first}, numel={header.numel}",
                )
            if len(self._buffer) - self._whole_bytes < header.frame_size:
                break
            self._whole_bytes += header.frame_size
            self._at += header.numel
            if self._at - self._first >= self._batch_numel:
                batches.append(self._cut())
        return batches

    def finish(self) -> list[FrameBatch]:
        """Returns the last batch, if one is left.

        Raises:
            FrameError: TRUNCATED: the frames end before their range does, or the bytes inside a frame.
        """
        if self._at != self._stop or self._whole_bytes != len(self._buffer):
            raise FrameError(
                WireReason.TRUNCATED, f"frames end before their range does. expected={self._stop}, actual={self._at}"
            )
        return [self._cut()] if self._whole_bytes else []

    def _cut(self) -> FrameBatch:
        with memoryview(self._buffer) as view:
            batch = FrameBatch(self._first, self._at - self._first, bytes(view[: self._whole_bytes]))
        del self._buffer[: self._whole_bytes]
        self._whole_bytes, self._first = 0, self._at
        return batch
