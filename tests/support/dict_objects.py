"""An object store that is simple enough to trust."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence

from skerry_syncer.store.errors import ObjectExistsError, ObjectMissingError
from skerry_syncer.store.objects.interface import STREAM_CHUNK_BYTES, Chunks, ObjectInfo, check_object_name, folder_of


async def joined(chunks: Chunks) -> bytes:
    """Returns all of `chunks` as one."""
    if isinstance(chunks, bytes | bytearray | memoryview):
        return bytes(chunks)
    return b"".join([chunk async for chunk in chunks] if isinstance(chunks, AsyncIterator) else chunks)


class DictObjects:
    """Objects in a dict of this process: no threads, no waiting, one order of events for one order of calls.

    Several replicas of a simulation share one.
    """

    def __init__(self, *, unix: Callable[[], float] = lambda: 0.0) -> None:
        self.objects: dict[str, tuple[bytes, float]] = {}
        self._unix = unix

    async def create(self, name: str, data: bytes) -> None:
        """Puts an object that must not exist."""
        if check_object_name(name) in self.objects:
            raise ObjectExistsError(f"object exists. name={name}")
        self.objects[name] = (bytes(data), self._unix())

    async def get(self, name: str) -> bytes:
        """Returns the object's bytes."""
        return self._data(name)

    async def write(self, name: str, chunks: Chunks) -> None:
        """Puts a blob."""
        data = await joined(chunks)
        self.objects[check_object_name(name)] = (data, self._unix())

    async def stream(self, name: str, *, offset: int = 0) -> AsyncIterator[bytes]:
        """Yields the object's bytes from `offset`."""
        data = self._data(name)
        for start in range(offset, len(data), STREAM_CHUNK_BYTES):
            yield data[start : start + STREAM_CHUNK_BYTES]

    async def folders(self, prefix: str) -> list[str]:
        """Returns the folders directly below `prefix`."""
        folder = folder_of(prefix)
        below = (name.removeprefix(folder) for name in self.objects if name.startswith(folder))
        return sorted({rest.split("/", 1)[0] for rest in below if "/" in rest})

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        """Yields every object below `prefix`."""
        folder = folder_of(prefix)
        for name in sorted(name for name in self.objects if name.startswith(folder)):
            data, modified = self.objects[name]
            yield ObjectInfo(name, len(data), modified)

    async def delete(self, names: Sequence[str]) -> None:
        """Deletes these objects."""
        for name in names:
            self.objects.pop(name, None)

    async def sync_parent(self, *names: str) -> None:
        """Does nothing: a dict has no power to lose."""

    def _data(self, name: str) -> bytes:
        try:
            return self.objects[check_object_name(name)][0]
        except KeyError:
            raise ObjectMissingError(f"object is missing. name={name}") from None
