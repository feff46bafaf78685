"""One bound, in bytes, on the parts of all pushes that a process holds in memory.

When the budget is exhausted, the stream is not read until memory is free (HTTP/2 back-pressure). A part is held whole
until it is durable, so pushes that each hold half a part could deadlock. Therefore the oldest holder is granted its
bytes even beyond the budget: it holds at most one part and then releases everything. Memory is bounded by the budget
plus one part, and every push makes progress.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self


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
        """Returns an empty grant, to be entered while a part is held."""
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

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()
