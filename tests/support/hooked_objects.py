"""Objects beside which something else happens at the worst moment."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeAlias

from skerry_syncer.store.objects.interface import Chunks
from tests.support.dict_objects import DictObjects

Hook: TypeAlias = Callable[[], Awaitable[None]]


class HookedObjects(DictObjects):
    """Calls hooks before an update is stored, before and after an entry of the log, and before a part is read."""

    def __init__(self) -> None:
        super().__init__()
        self.hooks: dict[str, Hook] = {}

    async def _call(self, moment: str) -> None:
        if moment in self.hooks:
            await self.hooks[moment]()

    async def write(self, name: str, chunks: Chunks) -> int:
        """Puts a blob."""
        if "/updates/" in name:
            await self._call("before_update")
        return await super().write(name, chunks)

    async def create(self, name: str, data: bytes) -> None:
        """Puts an object that must not exist."""
        await self._call("before_entry")
        await super().create(name, data)
        await self._call("after_entry")

    async def stream(self, name: str, *, offset: int = 0) -> AsyncIterator[bytes]:
        """Yields the object's bytes from `offset`."""
        if "/deltas/" in name:
            await self._call("before_part")
        async for piece in super().stream(name, offset=offset):
            yield piece
