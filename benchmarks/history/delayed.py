"""A store whose answers take a while, like one that is reached over a network."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from skerry_syncer.store.objects.interface import Chunks, ObjectInfo, Objects


class DelayedObjects:
    """Another store's objects; every request takes `delay_s` longer, and any number may be in flight."""

    def __init__(self, objects: Objects, delay_s: float) -> None:
        self._objects = objects
        self._delay_s = delay_s
        self.request_count = 0

    async def _delay(self) -> None:
        self.request_count += 1
        await asyncio.sleep(self._delay_s)

    async def create(self, name: str, data: bytes) -> None:
        """Puts an object that must not exist."""
        await self._delay()
        await self._objects.create(name, data)

    async def get(self, name: str, *, offset: int = 0, length: int | None = None) -> bytes:
        """Returns the object's bytes from `offset`, at most `length`."""
        await self._delay()
        return await self._objects.get(name, offset=offset, length=length)

    async def write(self, name: str, chunks: Chunks) -> int:
        """Puts a blob."""
        await self._delay()
        return await self._objects.write(name, chunks)

    async def stream(self, name: str, *, offset: int = 0) -> AsyncIterator[bytes]:
        """Yields the object's bytes from `offset`."""
        await self._delay()
        async for piece in self._objects.stream(name, offset=offset):
            yield piece

    async def folders(self, prefix: str) -> list[str]:
        """Returns the folders directly below `prefix`."""
        await self._delay()
        return await self._objects.folders(prefix)

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        """Yields every object below `prefix`."""
        await self._delay()
        async for info in self._objects.list(prefix):
            yield info

    async def delete(self, names: Sequence[str]) -> None:
        """Deletes these objects."""
        await self._delay()
        await self._objects.delete(names)

    async def sync_parent(self, *names: str) -> None:
        """Makes `name` durable: such stores have nothing to do."""
