"""Parts of deltas while they arrive: their memory is bounded, and each frame is checked before its part is stored.

One bound, in bytes, holds for the parts of all pushes of a process. A part is held whole until it is durable, so its
memory is reserved whole before its first byte is read; until then its stream is not read (HTTP/2 back-pressure). So no
push stops halfway because memory is short, and admitted ones use their links fully.

A slow sender holds its bytes for longer than a fast one, so senders share bytes times seconds. While memory is scarce,
the next part admitted is that of the sender that has held the least since memory became scarce. So a fast sender waits
for one part to finish, however many slow senders there are. No sender waits for ever: a push has one part at a time
(and a second one that is being stored, as long as memory is not scarce), and what it holds is counted. A sender whose
parts hold a sixteenth of the budget waits until one of its own parts is done, and others are admitted before it. While
somebody waits for others' bytes, a part that comes slowly is given up sooner.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from skerry.runtime.clock import Clock
from skerry.wire.codecs import MAX_FRAME_NUMEL, Codec, Compressor
from skerry.wire.digests import part_digest
from skerry.wire.errors import FrameError
from skerry.wire.frames import Frame, FrameBatch, open_frame, parse_frames, raw_bytes
from skerry.wire.layout import FragmentLayout
from skerry.wire.messages import MAX_BLOCK, MIN_BLOCK
from skerry.wire.quantise import quantised_squared_norms
from skerry_syncer.errors import SyncerError, from_wire

# Up to this many bytes of frames with this many elements are checked at once, because handing them to another thread
# would take longer. One frame costs as much as some hundred elements.
INLINE_CHECK_BYTES: Final = 32 * 2**10
INLINE_CHECK_NUMEL: Final = 2**15
FRAME_COST_NUMEL: Final = 512
# Of the budget, what one sender's parts may hold at a time: 16 of the suggested size, of 1 GiB.
_SENDER_SHARE: Final = 1 / 16


@dataclass(frozen=True)
class PartSummary:
    """What is known of a part whose every frame was decoded."""

    digest: bytes
    squared_norms: NDArray[np.float64]  # (tensors of the fragment,) |v_t|^2 restricted to the part
    kept: tuple[Frame, ...]  # decompressed, all or none


class PartChecker:
    """Checks one part's frames, which a `FrameReader` cut; holds one frame's elements.

    Decompressed frames are held too, for the merge, as long as they are at most `most_kept_bytes`.
    """

    def __init__(
        self, layout: FragmentLayout, numel: int, *, codecs: frozenset[Codec], most_kept_bytes: int = 0
    ) -> None:
        """Expects a part of `numel` elements, each frame in one of `codecs`."""
        self._frames: list[Frame] = []
        self._room_bytes = most_kept_bytes  # below 0: nothing is kept
        self._layout = layout
        self._codecs = codecs
        self._hasher = part_digest()
        self._norms: NDArray[np.float64] = np.zeros(len(layout.tensors), np.float64)
        self._scratch: NDArray[np.float32] = np.empty(min(numel, MAX_FRAME_NUMEL), np.float32)

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
        return PartSummary(self._hasher.digest(), self._norms, tuple(self._frames))

    def _check(self, frame: Frame) -> None:
        if frame.codec not in self._codecs or (frame.block and not MIN_BLOCK <= frame.block <= MAX_BLOCK):
            raise SyncerError(
                "ENCODING_UNSUPPORTED",
                f"encoding is not offered here. codec={frame.codec.value}, block={frame.block}, "
                f"codecs={sorted(codec.value for codec in self._codecs)}, blocks={MIN_BLOCK}..{MAX_BLOCK}",
            )
        if frame.compressor is not Compressor.NONE:
            frame = frame._replace(compressor=Compressor.NONE, payload=raw_bytes(frame))
        self._room_bytes -= frame.raw_size
        if self._room_bytes >= 0:
            self._frames.append(frame)
        else:
            self._frames.clear()
        values = self._scratch[: frame.numel]
        blocks, raw = open_frame(frame, self._layout, values)
        self._hasher.update(raw.data)
        quantised_squared_norms(
            frame.codec, raw, blocks, layout=self._layout, first=frame.first, scratch=values, norms=self._norms
        )


class ByteBudget:
    """Reserves memory for whole parts, in fair shares of bytes times seconds; for the tasks of one loop."""

    def __init__(self, limit_bytes: int, clock: Clock) -> None:
        """Reserves up to `limit_bytes` at a time; a larger part is let in alone."""
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.peak_bytes = 0
        self._clock = clock
        self._order = itertools.count()
        self._held: defaultdict[str, float] = defaultdict(float)  # by sender: bytes times seconds, since some waited
        self._used_by: Counter[str] = Counter()  # by sender: bytes
        self.is_scarce = False  # whether somebody waits for others' bytes
        self._on_scarcity: dict[Callable[[], None], None] = {}
        # A heap: held before, order, bytes, to grant, sender.
        self._waiting: list[tuple[float, int, int, asyncio.Event, str]] = []

    async def reserve(self, sender: str, size_bytes: int) -> Reservation:
        """Returns when `sender` may hold `size_bytes`, which the caller releases in any case."""
        await self._turn(sender, size_bytes)
        return Reservation(self, sender, size_bytes, self._clock.monotonic_s())

    @contextmanager
    def telling(self, scarce: Callable[[], None]) -> Iterator[None]:
        """Has `scarce` called whenever somebody begins to wait for others' bytes, for as long as the context lasts."""
        self._on_scarcity[scarce] = None
        try:
            yield
        finally:
            del self._on_scarcity[scarce]

    def has_room(self, size_bytes: int) -> bool:
        """Whether a request for `size_bytes` would be granted without waiting."""
        return not self._waiting and self.used_bytes + size_bytes <= self.limit_bytes

    def _give_back(self, one: Reservation) -> None:
        self._count(one.sender, -one.size_bytes)
        self._held[one.sender] += one.size_bytes * (self._clock.monotonic_s() - one.granted_at_s)
        if not self._waiting:
            self._held.clear()
        self._grant()

    async def _turn(self, sender: str, size_bytes: int) -> None:
        granted = asyncio.Event()
        one = (self._held[sender], next(self._order), size_bytes, granted, sender)
        heapq.heappush(self._waiting, one)
        self._grant()
        if self.is_scarce:
            for scarce in tuple(self._on_scarcity):
                scarce()
        try:
            await granted.wait()
        except asyncio.CancelledError:
            if granted.is_set():
                self._count(sender, -size_bytes)
            else:
                self._waiting.remove(one)
                heapq.heapify(self._waiting)
            self._grant()
            raise

    def _grant(self) -> None:
        """Grants what fits, in order; a part that does not fit keeps the others waiting, but for its sender's share."""
        passed, self.is_scarce = [], False
        while self._waiting:
            one = heapq.heappop(self._waiting)
            _, _, size_bytes, granted, sender = one
            used = self._used_by[sender]
            # In a small budget too, a push sends one part while the one before is stored.
            if used and used + size_bytes > max(self.limit_bytes * _SENDER_SHARE, 2 * size_bytes):
                passed.append(one)
                continue
            if self.used_bytes and self.used_bytes + size_bytes > self.limit_bytes:
                passed.append(one)
                self.is_scarce = True
                break
            self._count(sender, size_bytes)
            self.peak_bytes = max(self.peak_bytes, self.used_bytes)
            granted.set()
        for one in passed:
            heapq.heappush(self._waiting, one)

    def _count(self, sender: str, size_bytes: int) -> None:
        self.used_bytes += size_bytes
        self._used_by[sender] += size_bytes
        if not self._used_by[sender]:
            del self._used_by[sender]


@dataclass
class Reservation:
    """The bytes that one part may hold."""

    budget: ByteBudget
    sender: str
    size_bytes: int
    granted_at_s: float
    is_held: bool = True

    def release(self) -> None:
        """Returns the bytes to the budget. Idempotent."""
        if not self.is_held:
            return
        self.is_held = False
        self.budget._give_back(self)  # noqa: SLF001 - Reservation and ByteBudget are one unit
