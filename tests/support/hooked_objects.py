"""Objects beside which something else happens at the worst moment."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TypeAlias

from skerry_syncer.store.objects.interface import Chunks
from tests.support.dict_objects import DictObjects

Hook: TypeAlias = Callable[[], Awaitable[object]]


class HookedObjects(DictObjects):
    """Awaits hooks, which may take long or fail, around operations on objects whose names have a text in them."""

    def __init__(self, *, unix: Callable[[], float] = lambda: 0.0) -> None:
        super().__init__(unix=unix)
        self.hooks: dict[tuple[str, str], Hook] = {}  # by moment, such as "before write", and text
        self.calls: Counter[tuple[str, str]] = Counter()

    async def _call(self, moment: str, name: str) -> None:
        for key, hook in [*self.hooks.items()]:
            if key[0] == moment and key[1] in name:
                self.calls[key] += 1
                await hook()

    async def create(self, name: str, data: bytes) -> None:
        """Puts an object that must not exist."""
        await self._call("before create", name)
        await super().create(name, data)
        await self._call("after create", name)

    async def get(self, name: str) -> bytes:
        """Returns the object's bytes."""
        await self._call("before get", name)
        return await super().get(name)

    async def write(self, name: str, chunks: Chunks) -> int:
        """Puts a blob."""
        await self._call("before write", name)
        return await super().write(name, chunks)

    async def stream(self, name: str, *, offset: int = 0) -> AsyncIterator[bytes]:
        """Yields the object's bytes from `offset`."""
        await self._call("before stream", name)
        async for piece in super().stream(name, offset=offset):
            yield piece

    async def delete(self, names: Sequence[str]) -> None:
        """Deletes these objects."""
        await self._call("before delete", names[0])
        await super().delete(names)
        await self._call("after delete", names[0])
