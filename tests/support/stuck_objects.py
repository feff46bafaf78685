"""Objects of which some writes hang, as with a store that is slow or half dead."""

from __future__ import annotations

import asyncio

from skerry_syncer.store.objects.interface import Chunks
from tests.support.dict_objects import DictObjects


class StuckObjects(DictObjects):
    """A store in which writes, or all gets, of the objects whose names contain a word hang until `go` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.stuck = self.unread = "nothing hangs yet"
        self.go = asyncio.Event()
        self.hung: list[str] = []

    async def write(self, name: str, chunks: Chunks) -> int:
        """Puts a blob, reading it only when it is written."""
        if self.stuck in name:
            self.hung.append(name)
            await self.go.wait()
        return await super().write(name, chunks)

    async def get(self, name: str) -> bytes:
        """Returns the object's bytes."""
        if self.unread in name:
            await self.go.wait()
        return await super().get(name)
