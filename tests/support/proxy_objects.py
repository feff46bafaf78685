"""A way to an object store on which something may happen to every operation."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Final, TypeVar

from skerry_syncer.store.objects.interface import Chunks, ObjectInfo, Objects
from tests.support.dict_objects import joined

Result = TypeVar("Result")

CHANGES: Final = frozenset({"create", "write", "delete"})


class ProxyObjects:
    """Passes each operation through `call`, which a subclass defines."""

    def __init__(self, inner: Objects) -> None:
        self.inner = inner

    async def call(self, operation: str, name: str, act: Callable[[], Awaitable[Result]]) -> Result:
        """Does the operation, by `act`, and returns its result."""
        raise NotImplementedError

    async def create(self, name: str, data: bytes) -> None:
        """Puts an object that must not exist."""
        await self.call("create", name, lambda: self.inner.create(name, data))

    async def get(self, name: str) -> bytes:
        """Returns the object's bytes."""
        return await self.call("get", name, lambda: self.inner.get(name))

    async def write(self, name: str, chunks: Chunks) -> None:
        """Puts a blob."""
        data = await joined(chunks)
        await self.call("write", name, lambda: self.inner.write(name, data))

    async def stream(self, name: str, *, offset: int = 0) -> AsyncIterator[bytes]:
        """Yields the object's bytes from `offset`, in one piece."""

        async def whole() -> bytes:
            return await joined(self.inner.stream(name, offset=offset))

        yield await self.call("stream", name, whole)

    async def folders(self, prefix: str) -> list[str]:
        """Returns the folders directly below `prefix`."""
        return await self.call("folders", prefix, lambda: self.inner.folders(prefix))

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        """Yields every object below `prefix`."""

        async def everything() -> Sequence[ObjectInfo]:
            return [info async for info in self.inner.list(prefix)]

        for info in await self.call("list", prefix, everything):
            yield info

    async def delete(self, names: Sequence[str]) -> None:
        """Deletes these objects."""
        await self.call("delete", ",".join(names), lambda: self.inner.delete(names))

    async def sync_parent(self, *names: str) -> None:
        """Syncs the folder of the last of `names`."""
        await self.call("sync_parent", names[-1], lambda: self.inner.sync_parent(*names))
