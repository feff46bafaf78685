"""Parts of deltas while they arrive: their memory is bounded, and each frame is decoded before its part is stored.

One bound, in bytes, holds for the parts of all pushes of a process. When the budget is exhausted, the stream is not
read until memory is free (HTTP/2 back-pressure). A part is held whole until it is durable, so pushes that each hold
half a part could deadlock. Therefore the oldest holder is granted its bytes even beyond the budget: it holds at most
one part and then releases everything. Memory is bounded by the budget plus one part, and every push makes progress.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from skerry.algorithm.merge import per_tensor_squared_norms
from skerry.syncer.errors import SyncerError, from_wire
from skerry.wire.codecs import MAX_FRAME_NUMEL, Codec
from skerry.wire.digests import part_digest
from skerry.wire.errors import FrameError
from skerry.wire.frames import Frame, FrameBatch, decode_frame, parse_frames
from skerry.wire.layout import FragmentLayout
from skerry.wire.messages import MAX_BLOCK, MIN_BLOCK

# Below this many bytes of frames, checking them takes less time than handing them to another thread.
INLINE_CHECK_BYTES: Final = 32 * 2**10


@dataclass(frozen=True)
class PartSummary:
    """What is known of a part whose every frame was decoded."""

    digest: bytes
    squared_norms: tuple[float, ...]  # |v_t|^2 restricted to the part, one a tensor


class PartChecker:
    """Decodes one part's frames, which a `FrameReader` cut; holds one frame's elements."""

    def __init__(self, layout: FragmentLayout, numel: int, *, codecs: frozenset[Codec]) -> None:
        """Expects a part of `numel` elements, each frame in one of `codecs`."""
        self._layout = layout
        self._codecs = codecs
        self._hasher = part_digest()
        self._norms: NDArray[np.float64] = np.zeros(len(layout.tensors), np.float64)
        self._decoded: NDArray[np.float32] = np.empty(min(numel, MAX_FRAME_NUMEL), np.float32)

    def check(self, batches: Sequence[FrameBatch]) -> None:
        """Decodes the frames that follow; slow enough for a worker thread, and for one at a time.

        Raises:
            SyncerError: BAD_FRAME, NON_FINITE, OUT_OF_RANGE, ENCODING_UNSUPPORTED.
        """
        try:
            for batch in batches:
                for frame in parse_frames(batch.data):
                    self._check(frame)
        except FrameError as error:
            raise from_wire(error) from error

    def summary(self) -> PartSummary:
        """Returns what is known once every frame was checked."""
        return PartSummary(self._hasher.digest(), tuple(self._norms.tolist()))

    def _check(self, frame: Frame) -> None:
        if frame.codec not in self._codecs or (frame.block and not MIN_BLOCK <= frame.block <= MAX_BLOCK):
            raise SyncerError(
                "ENCODING_UNSUPPORTED",
                f"encoding is not offered here. codec={frame.codec.value}, block={frame.block}, "
                f"codecs={sorted(codec.value for codec in self._codecs)}, blocks={MIN_BLOCK}..{MAX_BLOCK}",
            )
        out = decode_frame(frame, self._layout, self._decoded[: frame.numel], digest=self._hasher)
        self._norms += per_tensor_squared_norms(out, self._layout, frame.first)


class ByteBudget:
    """Grants bytes to parts, the oldest first; for the tasks of one loop."""

    def __init__(self, limit_bytes: int) -> None:
        """Grants up to `limit_bytes`, plus one part."""
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.peak_bytes = 0
        self._holders: dict[Grant, None] = {}  # in the order in which they first asked
        self._waiting: dict[asyncio.Event, None] = {}

    def grant(self) -> Grant:
        """Returns an empty grant, to be released when its part is done with."""
        return Grant(self)

    async def _take(self, holder: Grant, size_bytes: int) -> None:
        self._holders.setdefault(holder)
        while self.used_bytes + size_bytes > self.limit_bytes and next(iter(self._holders)) is not holder:
            freed = asyncio.Event()
            self._waiting[freed] = None
            try:
                await freed.wait()
            finally:
                del self._waiting[freed]
        self.used_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)

    def _give_back(self, holder: Grant, size_bytes: int) -> None:
        self._holders.pop(holder, None)
        self.used_bytes -= size_bytes
        for freed in self._waiting:
            freed.set()


class Grant:
    """The bytes that one part holds of the budget."""

    def __init__(self, budget: ByteBudget) -> None:
        """Starts empty."""
        self._budget = budget
        self._size_bytes = 0

    async def take(self, size_bytes: int) -> None:
        """Returns when `size_bytes` more may be held."""
        await self._budget._take(self, size_bytes)  # noqa: SLF001 - Grant and ByteBudget are one unit
        self._size_bytes += size_bytes

    def release(self) -> None:
        """Returns all bytes to the budget."""
        size_bytes, self._size_bytes = self._size_bytes, 0
        self._budget._give_back(self, size_bytes)  # noqa: SLF001 - Grant and ByteBudget are one unit
