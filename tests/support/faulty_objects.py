"""Objects that fail as data says: errors before and after the effect, late landings, latency, crashes, sleepers.

For tests and simulations: a schedule decides every operation's fault, so one schedule gives one history.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, TypeVar

from skerry.runtime.clock import Clock
from skerry_syncer.store.errors import StoreError, StoreUnavailableError
from skerry_syncer.store.objects.interface import Chunks, ObjectInfo, Objects
from tests.support.dict_objects import joined

Result = TypeVar("Result")


class Effect(StrEnum):
    """What an operation does to the store, whatever the caller hears."""

    NORMAL = "normal"
    ERROR_BEFORE = "error_before"  # nothing happens, and the caller hears an error
    ERROR_AFTER = "error_after"  # it takes effect, and the caller hears an error
    LATE = "late"  # the caller hears an error, and it takes effect later; reads fail as by ERROR_BEFORE


@dataclass(frozen=True)
class Fault:
    """What happens to one operation."""

    effect: Effect = Effect.NORMAL
    error: type[StoreError] = StoreUnavailableError  # what the caller hears, where it hears an error
    latency_s: float = 0.0  # before the effect: long enough, and the caller is a writer that slept
    answer_latency_s: float = 0.0  # after the effect
    landing_s: float = 0.0  # LATE: how long after the error it lands


NO_FAULT: Final = Fault()
Schedule = Callable[[str, str], Fault]  # (operation, name) -> its fault; operations are called as methods of Objects


class LateWrites:
    """Writes that are still on their way to the store; replicas that share a store share these."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Callable[[], Awaitable[object]]]] = []
        self._count = itertools.count()

    def add(self, due_at: float, write: Callable[[], Awaitable[object]]) -> None:
        """Has `write` land at `due_at`, when anybody looks at the store from then on."""
        heapq.heappush(self._due, (due_at, next(self._count), write))

    async def land(self, until: float = float("inf")) -> None:
        """Lands what is due by `until`."""
        while self._due and self._due[0][0] <= until:
            _, _, write = heapq.heappop(self._due)
            try:
                await write()
            except StoreError:
                continue  # too late: the name is taken


class FaultyObjects:
    """One replica's way to a store, with faults on it."""

    def __init__(self, inner: Objects, schedule: Schedule, *, clock: Clock, late: LateWrites) -> None:
        self.inner = inner
        self.schedule = schedule
        self._clock = clock
        self._late = late
        self._writes_left: int | None = None

    def crash_after(self, write_count: int) -> None:
        """Lets this many more writes take effect; the answer of the last is lost, and nothing gets through after it."""
        self._writes_left = write_count

    async def create(self, name: str, data: bytes) -> None:
        """Puts an object that must not exist."""
        await self._change("create", name, lambda: self.inner.create(name, data))

    async def get(self, name: str) -> bytes:
        """Returns the object's bytes."""
        return await self._look("get", name, lambda: self.inner.get(name))

    async def write(self, name: str, chunks: Chunks) -> int:
        """Puts a blob."""
        data = await joined(chunks)
        await self._change("write", name, lambda: self.inner.write(name, data))
        return len(data)

    async def stream(self, name: str, *, offset: int = 0) -> AsyncIterator[bytes]:
        """Yields the object's bytes."""
        pieces = self.inner.stream(name, offset=offset)

        async def piece() -> bytes | None:
            return await anext(pieces, None)

        while (data := await self._look("stream", name, piece)) is not None:
            yield data

    async def folders(self, prefix: str) -> list[str]:
        """Returns the folders directly below `prefix`."""
        return await self._look("folders", prefix, lambda: self.inner.folders(prefix))

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        """Yields every object below `prefix`."""

        async def everything() -> Sequence[ObjectInfo]:
            return [info async for info in self.inner.list(prefix)]

        for info in await self._look("list", prefix, everything):
            yield info

    async def delete(self, names: Sequence[str]) -> None:
        """Deletes these objects."""
        await self._change("delete", names[0] if names else "", lambda: self.inner.delete(names))

    async def sync_parent(self, *names: str) -> None:
        """Syncs the folder of `name`."""
        await self._look("sync_parent", names[-1], lambda: self.inner.sync_parent(*names))

    async def _look(self, operation: str, name: str, act: Callable[[], Awaitable[Result]]) -> Result:
        fault = await self._begin(operation, name)
        if fault.effect is not Effect.NORMAL:
            raise self._error(fault, operation, name)
        result = await act()
        await self._pause(fault.answer_latency_s)
        return result

    async def _change(self, operation: str, name: str, act: Callable[[], Awaitable[object]]) -> None:
        fault = await self._begin(operation, name)
        if fault.effect is Effect.LATE:
            self._late.add(self._clock.monotonic_s() + fault.landing_s, act)
        if fault.effect in (Effect.ERROR_BEFORE, Effect.LATE):
            raise self._error(fault, operation, name)
        if self._writes_left is not None:
            self._writes_left -= 1
        await act()
        if self._writes_left == 0 or fault.effect is Effect.ERROR_AFTER:
            raise self._error(fault, operation, name)
        await self._pause(fault.answer_latency_s)

    async def _begin(self, operation: str, name: str) -> Fault:
        """Waits as long as the fault says and returns it."""
        fault = self.schedule(operation, name)
        await self._pause(fault.latency_s)
        await self._late.land(self._clock.monotonic_s())
        if self._writes_left is not None and self._writes_left <= 0:
            raise StoreUnavailableError(f"replica crashed. operation={operation}, name={name}")
        return fault

    async def _pause(self, duration_s: float) -> None:
        if duration_s > 0:
            await self._clock.sleep(duration_s)

    @staticmethod
    def _error(fault: Fault, operation: str, name: str) -> StoreError:
        return fault.error(f"fault was injected. operation={operation}, name={name}")
