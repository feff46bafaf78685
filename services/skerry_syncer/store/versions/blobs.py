"""The blobs of one run: parts of deltas, updates and snapshots. FORMAT.md specifies their names and bytes.

A blob is written before the entry that names it, under a name that ends in a random write id, and exists only once the
entry does. So two writers never use the same name, and what a crash leaves behind is litter.
Frames are read back in batches of whole ones, however the store cuts their bytes.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Container, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from itertools import chain
from typing import Final, Literal

import msgspec
import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from skerry.runtime.identifiers import Entropy
from skerry.runtime.workers import Workers
from skerry.wire.frames import Frame, FrameBatch, FrameReader
from skerry.wire.layout import FragmentLayout
from skerry.wire.safetensors import header_bytes, tensor_bytes
from skerry_syncer.store.errors import (
    CollectedError,
    LogCorruptError,
    NewerFormatError,
    ObjectMissingError,
    StoreFullError,
    UnreadableObjectError,
)
from skerry_syncer.store.log.entries import FORMAT, ObjectRef, bytes_digest, canonical_json
from skerry_syncer.store.objects.interface import STREAM_CHUNK_BYTES, Chunks, Objects, read_json
from skerry_syncer.store.versions.recent import RecentContents

SnapshotKind = Literal["weights", "momentum", "residual"]

_READS_AT_ONCE: Final = 16
# Of a run's parts in memory, decompressed, until they are merged: int4 deltas of 120 million elements.
_RECENT_PARTS_BYTES: Final = 64 * 2**20
_RECENT_UPDATES_BYTES: Final = 32 * 2**20  # of a run's newest updates in memory, which every learner pulls
_PART: Final = re.compile(r"(\d{1,19})-(\d{1,19})-([0-9a-f]{64})-[0-9a-f]{32}")


@dataclass(frozen=True)
class StoredPart:
    """A durable part of a delta that need not be accepted yet."""

    ref: ObjectRef
    # |v_t|^2 of what the part has of tensors in a row, from this one of the fragment's on; of all others 0. A fragment
    # may have 100,000 tensors, and a delta thousands of parts.
    first_tensor: int
    squared_norms: tuple[float, ...]

    @classmethod
    def of(cls, ref: ObjectRef, squared_norms: Sequence[float] | NDArray[np.float64]) -> StoredPart:
        """Takes the norms of all tensors of the fragment."""
        norms = np.trim_zeros(np.asarray(squared_norms), "f")
        return cls(ref, len(squared_norms) - len(norms), tuple(np.trim_zeros(norms, "b").tolist()))


def summed_norms(parts: Iterable[StoredPart], tensor_count: int) -> tuple[float, ...]:
    """Returns |v_t|^2 of each tensor of the fragment, of which these are all parts."""
    norms = [0.0] * tensor_count
    for part in parts:
        for index, norm in enumerate(part.squared_norms, part.first_tensor):
            norms[index] += norm
    return tuple(norms)


class StoredParts(dict[tuple[int, int], StoredPart]):
    """Durable parts of one delta, by first element and number of elements."""


class Blobs:
    """Writes and reads the blobs of one run."""

    def __init__(
        self,
        objects: Objects,
        prefix: str,
        entropy: Entropy,
        *,
        workers: Workers,
        condemned: Container[str],
        look: Callable[[], Awaitable[object]] | None = None,
    ) -> None:
        """Never reuses a part whose name is in `condemned`, which the owner keeps, and `look` brings up to date."""
        self._objects = objects
        self._prefix = prefix
        self._entropy = entropy
        self._workers = workers
        self._condemned = condemned
        self._look = look
        # Names of updates and snapshots that were lost or damaged when they were last read, so that readers go around.
        self.unreadable: set[str] = set()
        self.recent_parts: RecentContents[Frame] = RecentContents(_RECENT_PARTS_BYTES)
        self._recent_updates: RecentContents[bytes] = RecentContents(_RECENT_UPDATES_BYTES)
        self.is_full = False  # whether the store had no space for the newest blob

    async def write_part(  # noqa: PLR0917 - the order is that of the part's name, then what it holds
        self,
        fragment: str,
        delta: str,
        first: int,
        numel: int,
        digest: str,
        squared_norms: Sequence[float] | NDArray[np.float64],
        frames: Sequence[bytes | memoryview],
        kept: Sequence[Frame] = (),
    ) -> StoredPart:
        """Stores the frames that cover `numel` elements from `first`, cut anywhere. The returned part is durable.

        `digest` is the BLAKE3 of the frames' uncompressed bytes, hex, which the caller has checked. `kept` are the
        same frames, checked and decompressed, where a merge is to find them in memory.
        """
        place = {"fragment": fragment, "delta": delta, "first": first, "numel": numel, "digest": digest}
        name = f"deltas/{fragment}/{delta}/{first}-{numel}-{digest}-{self._entropy.hex_id()}"
        # With many tensors that takes too long for the event loop.
        line = await self._workers.run(_header_line, place, squared_norms)
        await self._write(name, (line, *frames))
        size_bytes = sum(map(len, (line, *frames)))
        self.recent_parts.put(name, kept, sum(len(frame.payload) for frame in kept))
        return StoredPart.of(ObjectRef(name, first, numel, size_bytes, digest), squared_norms)

    async def list_parts(self, fragment: str, delta: str) -> list[StoredPart]:
        """Returns the durable parts of a delta in element order, one per range and digest, without condemned ones."""
        refs: dict[tuple[int, int, str], ObjectRef] = {}
        async for info in self._objects.list(self._path(f"deltas/{fragment}/{delta}")):
            name = info.name.removeprefix(f"{self._prefix}/")
            match = _PART.fullmatch(name.rpartition("/")[2])
            if match is None or name in self._condemned:
                continue
            key = first, numel, digest = int(match[1]), int(match[2]), match[3]
            refs[key] = ObjectRef(name, first, numel, info.size_bytes, digest)  # of several, any will do
        if refs:  # their writers may have been killed before they had synced the folder
            await self._objects.sync_parent(*(self._path(ref.name) for ref in refs.values()))
        limit = asyncio.Semaphore(_READS_AT_ONCE)

        async def stored(ref: ObjectRef) -> StoredPart | None:
            async with limit:
                return await self._stored_part(ref)

        parts = await asyncio.gather(*(stored(refs[key]) for key in sorted(refs)))
        return [part for part in parts if part is not None]

    async def part_frames(self, ref: ObjectRef) -> AsyncIterator[bytes | memoryview]:
        """Yields the bytes of a part's frames in pieces of at most 512 KiB, which may end inside a frame.

        Raises:
            CollectedError: a collection took the part, as the log says by now.
            ObjectMissingError: it is lost.
            UnreadableObjectError: it has no header line.
        """
        pieces = self.read(ref)
        yield (await _head(ref, pieces))[1]
        async for piece in pieces:
            yield piece

    async def write_update(
        self, fragment: str, version: int, frames: Sequence[bytes], first: int, numel: int
    ) -> ObjectRef:
        """Stores the frames of an update that cover `numel` elements from `first` and returns where."""
        name = f"updates/{fragment}/{version}-{self._entropy.hex_id()}"
        data = await self._workers.run(b"".join, frames)
        digest = await self._workers.run(bytes_digest, data)
        await self._write(name, data)
        self._recent_updates.put(name, (data,), len(data))
        return ObjectRef(name, first, numel, len(data), digest)

    async def write_snapshot(
        self, layout: FragmentLayout, version: int, kind: SnapshotKind, values: NDArray[np.float32]
    ) -> ObjectRef:
        """Stores a fragment's values, (numel,), as a safetensors file.

        They may be memory-mapped, and must not change until this returns.
        """
        name = f"snapshots/{layout.name}/{version}-{kind}-{self._entropy.hex_id()}"
        hasher, size_bytes = blake3(), 0

        async def hashed() -> AsyncIterator[bytes]:
            nonlocal size_bytes
            async for piece in snapshot_pieces(layout.name, version, kind, dict(layout.pieces(values))):
                await self._workers.run(hasher.update, piece)
                size_bytes += len(piece)
                yield piece

        await self._write(name, hashed())
        return ObjectRef(name, 0, layout.numel, size_bytes, hasher.hexdigest())

    async def read(self, ref: ObjectRef, *, offset: int = 0) -> AsyncGenerator[bytes, None]:
        """Yields the bytes of an object of any kind from `offset`, in pieces of at most 512 KiB.

        Raises:
            CollectedError: a collection took the object, as the log says by now.
            ObjectMissingError: it is lost.
        """
        try:
            async for piece in self._objects.stream(self._path(ref.name), offset=offset):
                yield piece
        except ObjectMissingError as error:
            if ref.name not in self._condemned and self._look is not None:
                with suppress(LogCorruptError, NewerFormatError):  # the log can't be read on
                    await self._look()  # a collection condemns an object before it deletes it
            if ref.name in self._condemned:
                raise CollectedError(f"object was collected. name={ref.name}") from error
            raise

    async def read_checked(self, ref: ObjectRef) -> AsyncGenerator[bytes, None]:
        """Yields all bytes of an update or snapshot, in pieces of at most 512 KiB; the last one once all were checked.

        Raises:
            CollectedError: a collection took it, as the log says by now.
            UnreadableObjectError: it is lost, or has other bytes than were written.
        """
        for recent in self._recent_updates.get(ref.name):
            for start in range(0, ref.size_bytes, STREAM_CHUNK_BYTES):
                yield recent[start : start + STREAM_CHUNK_BYTES]
            return
        hasher, size = blake3(), 0
        try:
            async for piece in self.read(ref):
                await self._workers.run(hasher.update, piece)
                size += len(piece)
                if size >= ref.size_bytes and hasher.hexdigest() != ref.digest:
                    break
                yield piece
        except CollectedError:
            raise
        except ObjectMissingError as error:
            self.unreadable.add(ref.name)
            raise UnreadableObjectError(ref.name, error) from error
        if (size, hasher.hexdigest()) != (ref.size_bytes, ref.digest):
            self.unreadable.add(ref.name)
            raise UnreadableObjectError(ref.name, f"it has other bytes. size_bytes={size}, expected={ref.size_bytes}")
        self.unreadable.discard(ref.name)

    async def _write(self, name: str, chunks: Chunks) -> None:
        try:
            await self._objects.write(self._path(name), chunks)
        except StoreFullError:
            self.is_full = True
            raise
        self.is_full = False

    async def _stored_part(self, ref: ObjectRef) -> StoredPart | None:
        """Returns the part with the norms of its header line; None if it is collected or damaged: it is sent again."""
        with suppress(ObjectMissingError, UnreadableObjectError, ValueError):
            async with aclosing(self.read(ref)) as pieces:
                line, _ = await _head(ref, pieces)
            return StoredPart.of(ref, read_json(line, _PartHeader).squared_norms)
        return None

    def _path(self, name: str) -> str:
        return f"{self._prefix}/{name}"


async def _head(ref: ObjectRef, pieces: AsyncIterator[bytes]) -> tuple[bytes, memoryview]:
    """Returns a part's header line, and what its first pieces have after it."""
    head = b""
    async for piece in pieces:
        head += piece
        end = head.find(b"\n")
        if end >= 0:
            return head[:end], memoryview(head)[end + 1 :]
    raise UnreadableObjectError(ref.name, "part has no header line")


def _header_line(place: Mapping[str, object], squared_norms: Sequence[float] | NDArray[np.float64]) -> bytes:
    norms = [float(norm) for norm in squared_norms]
    return canonical_json({"format": FORMAT, **place, "squared_norms": norms}) + b"\n"


class _PartHeader(msgspec.Struct):
    """What is read of a part's first line."""

    squared_norms: tuple[float, ...]


async def snapshot_pieces(
    fragment: str, version: int, kind: SnapshotKind, tensors: Mapping[str, NDArray[np.float32]]
) -> AsyncIterator[bytes]:
    """Yields the bytes of a snapshot: equal values give equal bytes."""
    yield header_bytes(
        {tensor: ("float32", values.shape) for tensor, values in tensors.items()},
        {"format": str(FORMAT), "fragment": fragment, "version": str(version), "kind": kind},
    )
    waiting: list[bytes] = []
    size = 0
    for piece in chain.from_iterable(map(tensor_bytes, tensors.values())):
        waiting.append(piece)  # small tensors go together: each piece that is yielded costs some jobs of workers
        size += len(piece)
        if size >= STREAM_CHUNK_BYTES:
            yield b"".join(waiting)
            waiting, size = [], 0
    if waiting:
        yield b"".join(waiting)


# Elements of a batch, which one worker job decodes, but for its last frame: 8 MiB of float32, some 900 kB of int4.
BATCH_NUMEL: Final = 2**21


async def frame_batches(pieces: AsyncIterator[bytes | memoryview], first: int, numel: int) -> AsyncIterator[FrameBatch]:
    """Yields the frames of `pieces`, which must cover `[first, first + numel)` in order, as views of the pieces.

    Raises:
        FrameError: TRUNCATED, LAYOUT, BAD_HEADER, TOO_LARGE or BOMB, by the frames' headers alone.
    """
    reader = FrameReader(first, numel, batch_numel=BATCH_NUMEL)
    async for piece in pieces:
        for batch in reader.feed(piece):
            yield batch
    reader.finish()
