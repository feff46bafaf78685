"""Objects that fail as data says: errors before and after the effect, late landings, latency, crashes, sleepers.

For tests and simulations: a schedule decides every operation's fault, so one schedule gives one history.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from skerry.runtime.clock import Clock
from skerry_syncer.store.errors import StoreError, StoreUnavailableError
from skerry_syncer.store.objects.interface import Objects
from tests.support.proxy_objects import CHANGES, ProxyObjects, Result


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


class FaultyObjects(ProxyObjects):
    """One replica's way to a store, with faults on it."""

    def __init__(self, inner: Objects, schedule: Schedule, *, clock: Clock, late: LateWrites) -> None:
        super().__init__(inner)
        self.schedule = schedule
        self._clock = clock
        self._late = late
        self._writes_left: int | None = None

    def crash_after(self, write_count: int) -> None:
        """Lets this many more writes take effect; the answer of the last is lost, and nothing gets through after it."""
        self._writes_left = write_count

    async def call(self, operation: str, name: str, act: Callable[[], Awaitable[Result]]) -> Result:
        """Does the operation as its fault says."""
        fault, is_change = self.schedule(operation, name), operation in CHANGES
        await self._pause(fault.latency_s)
        await self._late.land(self._clock.monotonic_s())
        if self._writes_left is not None and self._writes_left <= 0:
            raise StoreUnavailableError(f"replica crashed. operation={operation}, name={name}")
        error = fault.error(f"fault was injected. operation={operation}, name={name}")
        if is_change and fault.effect is Effect.LATE:
            self._late.add(self._clock.monotonic_s() + fault.landing_s, act)
        if fault.effect is not Effect.NORMAL and not (is_change and fault.effect is Effect.ERROR_AFTER):
            raise error
        if is_change and self._writes_left is not None:
            self._writes_left -= 1
        result = await act()
        if fault.effect is Effect.ERROR_AFTER or (is_change and self._writes_left == 0):
            raise error
        await self._pause(fault.answer_latency_s)
        return result

    async def _pause(self, duration_s: float) -> None:
        if duration_s > 0:
            await self._clock.sleep(duration_s)
