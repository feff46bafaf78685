"""Checks the frames of a part while they arrive: what is kept has been decoded once and is known to be sound."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from skerry.syncer.errors import SyncerError, from_wire
from skerry.wire.codecs import Codec
from skerry.wire.cutting import MAX_FRAME_NUMEL
from skerry.wire.digests import part_digest
from skerry.wire.errors import FrameError, WireReason
from skerry.wire.frames import HEADER_SIZE, decode_frames, frame_size, parse_frames
from skerry.wire.layout import FragmentLayout
from skerry.wire.messages import MAX_BLOCK, MIN_BLOCK
from skerry.wire.norms import per_tensor_squared_norms


class FrameCutter:
    """Cuts a stream of bytes into whole frames; holds less than one frame and one message."""

    def __init__(self) -> None:
        """Starts at a frame's first byte."""
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Returns the frames that `data` completes.

        Raises:
            FrameError: a header is not one, or claims more than a frame may hold.
        """
        self._buffer += data
        frames = []
        start = 0
        while len(self._buffer) - start >= HEADER_SIZE:
            size = frame_size(bytes(self._buffer[start : start + HEADER_SIZE]))
            if len(self._buffer) - start < size:
                break
            frames.append(bytes(self._buffer[start : start + size]))
            start += size
        del self._buffer[:start]
        return frames

    def finish(self) -> None:
        """Checks that no frame is unfinished.

        Raises:
            FrameError: one is.
        """
        if self._buffer:
            raise FrameError(WireReason.TRUNCATED, f"bytes end inside a frame. size_bytes={len(self._buffer)}")


@dataclass(frozen=True)
class PartSummary:
    """What is known of a part whose every frame was decoded."""

    digest: bytes
    squared_norms: tuple[float, ...]  # |v_t|^2 restricted to the part, one a tensor


class PartChecker:
    """Decodes one part's frames in order; holds one frame's elements."""

    def __init__(self, layout: FragmentLayout, first: int, numel: int, *, codecs: frozenset[Codec]) -> None:
        """Expects frames that cover `[first, first + numel)` exactly, each in one of `codecs`."""
        self._layout = layout
        self._at = first
        self._stop = first + numel
        self._codecs = codecs
        self._hasher = part_digest()
        self._norms: NDArray[np.float64] = np.zeros(len(layout.tensors), np.float64)
        self._decoded: NDArray[np.float32] = np.empty(min(numel, MAX_FRAME_NUMEL), np.float32)

    def check(self, frames: list[bytes]) -> None:
        """Decodes the frames that follow; slow enough for a worker thread, and for one at a time.

        Raises:
            SyncerError: BAD_FRAME, NON_FINITE, OUT_OF_RANGE, ENCODING_UNSUPPORTED.
        """
        try:
            for data in frames:
                self._check_one(data)
        except FrameError as error:
            raise from_wire(error) from error

    def finish(self) -> PartSummary:
        """Returns the summary.

        Raises:
            SyncerError: BAD_FRAME: the frames end before the part does.
        """
        if self._at != self._stop:
            raise SyncerError(
                "BAD_FRAME", f"frames end before their part does. expected={self._stop}, actual={self._at}"
            )
        return PartSummary(self._hasher.digest(), tuple(self._norms.tolist()))

    def _check_one(self, data: bytes) -> None:
        (frame,) = parse_frames(data)
        if frame.codec not in self._codecs or (frame.block and not MIN_BLOCK <= frame.block <= MAX_BLOCK):
            raise SyncerError(
                "ENCODING_UNSUPPORTED",
                f"encoding is not offered here. codec={frame.codec.value}, block={frame.block}, "
                f"codecs={sorted(codec.value for codec in self._codecs)}, blocks={MIN_BLOCK}..{MAX_BLOCK}",
            )
        if frame.first != self._at or frame.first + frame.numel > self._stop:
            raise SyncerError(
                "OUT_OF_RANGE",
                f"frame is outside its part, or out of order. expected_first={self._at}, part_end={self._stop}, "
                f"first={frame.first}, numel={frame.numel}",
            )
        out = self._decoded[: frame.numel]
        decode_frames(data, self._layout, out, first=frame.first, digest=self._hasher)
        self._norms += per_tensor_squared_norms(out, self._layout, frame.first)
        self._at += frame.numel


# Bytes of frames below which checking them is quicker than handing them to another thread.
INLINE_CHECK_BYTES: Final = 32 * 2**10
