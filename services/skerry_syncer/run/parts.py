"""Memory for bytes in flight, and the assembly of a delta's part while it arrives.

One bound, in bytes, holds for a process: for parts of pushes until they are durable, and for pieces of downloads until
they are sent. A part's memory is reserved whole before its first byte is read. Until then its stream is not read
(HTTP/2 back-pressure), so no push stops halfway because memory is short, and admitted ones use their links fully.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from typing import Final

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from skerry.wire.codecs import MAX_FRAME_NUMEL, Codec, Compressor
from skerry.wire.frames import Frame, FrameReader, open_frame, parse_frames, raw_bytes
from skerry.wire.layout import FragmentLayout
from skerry.wire.messages import MAX_BLOCK, MIN_BLOCK
from skerry.wire.quantise import quantised_squared_norms
from skerry_syncer.errors import SyncerError

# Of a budget, for one client: 64 MiB by default, which fills 5 Gbit/s at a round trip of 100 ms.
_MOST_SHARE: Final = 1 / 8
# A part's frames are kept for the merge if they decompress to at most this many times its size.
_MOST_KEPT_TIMES: Final = 2


class ByteBudget:
    """Reserves memory in the order of the requests; for the tasks of one loop.

    A client that holds an eighth of it waits, and others pass it: one that stops in the middle of its transfers keeps
    no more from them.
    """

    def __init__(self, limit_bytes: int) -> None:
        """Reserves up to `limit_bytes` at a time; a larger request is let in alone."""
        self.limit_bytes = limit_bytes
        self._held: Counter[str] = Counter()
        self._waiting: deque[tuple[str, int, asyncio.Future[None]]] = deque()

    @property
    def used_bytes(self) -> int:
        """The memory that all clients hold."""
        return self._held.total()

    async def reserve(self, client: str, size_bytes: int) -> None:
        """Returns when the client may hold `size_bytes`, which must be released."""
        granted = asyncio.get_running_loop().create_future()
        self._waiting.append((client, size_bytes, granted))
        self._grant()
        try:
            await granted
        except asyncio.CancelledError:
            self.release(client, 0 if granted.cancelled() else size_bytes)
            raise

    def release(self, client: str, size_bytes: int) -> None:
        """Returns a client's bytes to the budget."""
        self._held[client] -= size_bytes
        if not self._held[client]:
            del self._held[client]
        self._grant()

    def _grant(self) -> None:
        """Grants what fits, in order: of the clients that hold less than their share, none is overtaken for ever."""
        waiting, self._waiting = self._waiting, deque()
        used_bytes, is_full = self.used_bytes, False
        for client, size_bytes, granted in waiting:
            if granted.cancelled():
                continue
            held_bytes = self._held[client]
            if is_full or (held_bytes and held_bytes + size_bytes > self.limit_bytes * _MOST_SHARE):
                self._waiting.append((client, size_bytes, granted))
            elif used_bytes and used_bytes + size_bytes > self.limit_bytes:
                is_full = True
                self._waiting.append((client, size_bytes, granted))
            else:
                self._held[client] += size_bytes
                used_bytes += size_bytes
                granted.set_result(None)


class ArrivingPart:
    """The part `[first, first + numel)` of a delta: checks its frames as they come, one frame's elements at a time."""

    def __init__(
        self, layout: FragmentLayout, first: int, numel: int, *, codecs: frozenset[Codec], limit_bytes: int
    ) -> None:
        """Takes at most `limit_bytes` of frames, each in one of `codecs`."""
        self.first = first
        self.numel = numel
        self.limit_bytes = limit_bytes
        self.size_bytes = 0
        self.waited_s = 0.0  # for its client
        self.frames: list[bytes | memoryview] = []
        self.kept: list[Frame] = []  # decompressed, all or none
        self.squared_norms: NDArray[np.float64] = np.zeros(len(layout.tensors), np.float64)  # |v_t|^2 within the part
        self._layout = layout
        self._codecs = codecs
        self._room_bytes = _MOST_KEPT_TIMES * limit_bytes  # below 0: nothing is kept
        self._reader = FrameReader(first, numel)
        self._hasher = blake3()
        self._values: NDArray[np.float32] = np.empty(min(numel, MAX_FRAME_NUMEL), np.float32)

    def feed(self, data: bytes | memoryview) -> None:
        """Decodes the frames that `data`, cut anywhere, completes; slow enough for a worker thread.

        Raises:
            SyncerError: ENCODING_UNSUPPORTED, TOO_LARGE.
            FrameError: the frames can't be decoded.
        """
        self.size_bytes += len(data)
        if self.size_bytes > self.limit_bytes:
            raise SyncerError("TOO_LARGE", f"part has too many bytes. limit={self.limit_bytes}")
        for batch in self._reader.feed(data):
            self.frames.append(batch.data)
            for frame in parse_frames(batch.data):
                self._check(frame)

    def finish(self) -> bytes:
        """Returns the part's digest.

        Raises:
            FrameError: it is not whole.
        """
        self._reader.finish()
        return self._hasher.digest()

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
            self.kept.append(frame)
        else:
            self.kept.clear()
        values = self._values[: frame.numel]
        blocks, raw = open_frame(frame, self._layout, values)
        self._hasher.update(raw.data)
        quantised_squared_norms(
            frame.codec,
            raw,
            blocks,
            layout=self._layout,
            first=frame.first,
            scratch=values,
            norms=self.squared_norms,
        )
