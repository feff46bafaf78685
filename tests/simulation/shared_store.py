"""One object store that all replicas reach over links of their own, each with its faults.

An operation is a request that travels, an effect at the store, and an answer that travels back; what happens to the
process meanwhile does not change what was sent. So a write may land after its writer was killed, stopped or told
that it failed.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from skerry_syncer.store.errors import ObjectExistsError, StoreError, StoreFullError, StoreUnavailableError
from skerry_syncer.store.objects.interface import ObjectInfo
from tests.simulation.processes import OUTSIDE, Process
from tests.support.dict_objects import DictObjects
from tests.support.faulty_objects import Effect
from tests.support.proxy_objects import CHANGES, ProxyObjects, Result


@dataclass(frozen=True)
class StoreFaults:
    """How often an operation fails, and how; each a probability."""

    error_before: float = 0.0
    error_after: float = 0.0
    late: float = 0.0
    says_exists: float = 0.0  # of failed creates: the error says "exists", whatever happened
    says_full: float = 0.0  # of failed changes: the error says "full"
    damaged: float = 0.0  # of reads of snapshots and updates: a bit is turned, or the end is missing
    cut: float = 0.0  # of streams: they end with an error before their last byte
    slow: float = 0.0
    latency_s: tuple[float, float] = (0.001, 0.02)  # each way
    slow_s: tuple[float, float] = (0.5, 8.0)
    landing_s: tuple[float, float] = (0.05, 25.0)


CALM_STORE: Final = StoreFaults()


class SharedStore:
    """The store itself, and a journal of when each log entry landed."""

    def __init__(self, count: Callable[[], int]) -> None:
        """Takes the world's count of events, which orders landings and acknowledgements."""
        # Each object is two days younger than the one before, so collections take blobs of entries that are under way.
        self.objects = DictObjects(unix=partial(next, itertools.count(0.0, 2 * 86_400.0)))
        self.landed: dict[str, int] = {}  # log entry -> count of events when it landed
        self.landed_at_s: dict[str, float] = {}  # and the time
        self.deleted: dict[str, tuple[bytes, int]] = {}  # objects, with the count of events when they were deleted
        self._count = count

    def perform(self, operation: str, name: str, act: Callable[[], Awaitable[Result]]) -> Result:
        """Does what a request asks, at once.

        Raises:
            StoreError: the operation's own answer.
        """
        if operation == "delete":
            there = [one for one in name.split(",") if one in self.objects.objects]
            self.deleted |= {one: (self.objects.objects[one][0], self._count()) for one in there}
        result = _driven(act())
        if operation == "create" and "/log/" in name:
            self.landed[name], self.landed_at_s[name] = self._count(), asyncio.get_running_loop().time()
        return result


def _driven(work: Awaitable[Result]) -> Result:
    """Returns the result of work that never waits."""
    try:
        next(work.__await__())
    except StopIteration as done:
        result: Result = done.value
        return result
    raise AssertionError("objects in a dict do not wait")


@dataclass(eq=False)
class StoreLink(ProxyObjects):
    """One process's way to the store (`skerry_syncer.store.objects.interface.Objects`), whose faults `source` draws."""

    store: SharedStore
    process: Process
    faults: StoreFaults
    source: random.Random
    is_down: bool = False
    on_kill: Callable[[], None] = lambda: None
    _left: int | None = None
    _dies_before: bool = False

    def __post_init__(self) -> None:
        super().__init__(self.store.objects)

    def kill_after(self, operation_count: int, *, before: bool) -> None:
        """Kills the process at its n-th operation from now: before it is sent, or when it took effect."""
        self._left, self._dies_before = operation_count, before

    def come_back(self) -> None:
        """Ends an outage."""
        self.is_down = False

    def calm(self) -> None:
        """Ends every fault."""
        self.faults, self.is_down, self._left = CALM_STORE, False, None

    async def stream(self, name: str, *, offset: int = 0) -> AsyncIterator[bytes]:
        """Yields the object's bytes, cut in two; where the stream itself is cut, an error comes after a part."""
        data = await self.call("stream", name, lambda: self.inner.get(name))
        data = self._damaged(name, data[offset:])
        is_cut = bool(self.faults.cut) and len(data) > 1 and self.source.random() < self.faults.cut
        middle = self.source.randrange(1, len(data)) if is_cut else len(data) // 2
        if middle:
            yield data[:middle]
        if is_cut:
            raise StoreUnavailableError(f"fault was injected. operation=stream, name={name}")
        yield data[middle:]

    def _damaged(self, name: str, data: bytes) -> bytes:
        """Returns the bytes as they are read; no draw is made where nothing is ever damaged."""
        is_blob = "/snapshots/" in name or "/updates/" in name
        if not self.faults.damaged or not is_blob or self.source.random() >= self.faults.damaged:
            return data
        if self.source.random() < 0.5:
            return data[: len(data) // 2]
        at = self.source.randrange(len(data))
        return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        """Yields every object below `prefix`, in an order that nobody may rely on."""
        infos = [info async for info in super().list(prefix)]
        self.source.shuffle(infos)
        for info in infos:
            yield info

    async def sync_parent(self, *names: str) -> None:
        """Does nothing: power cuts are not simulated."""

    async def call(self, operation: str, name: str, act: Callable[[], Awaitable[Result]]) -> Result:
        """Sends the request, and returns what its answer brings."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Result] = loop.create_future()
        dies = self._dies_now()
        if dies and self._dies_before:
            self._die()
            return await answer
        effect, error = self._draw(operation, name)
        request_s, answer_s = self._latency_s(), self._latency_s()

        def arrive() -> None:
            result: Any = None
            failure: StoreError | None = None
            if effect is Effect.NORMAL or (effect is Effect.ERROR_AFTER and operation in CHANGES):
                try:
                    result = self.store.perform(operation, name, act)
                except StoreError as refusal:
                    failure = refusal
            elif effect is Effect.LATE and operation in CHANGES:
                landing_s = self.source.uniform(*self.faults.landing_s)
                loop.call_later(landing_s, self._land, operation, name, act, context=OUTSIDE)
            if effect is not Effect.NORMAL:
                failure = error
            if dies:
                self._die()
            loop.call_later(answer_s, _set_answer, answer, result, failure, context=OUTSIDE)

        loop.call_later(request_s, arrive, context=OUTSIDE)
        return await answer

    def _land(self, operation: str, name: str, act: Callable[[], Awaitable[Any]]) -> None:
        try:
            self.store.perform(operation, name, act)
        except StoreError:
            return  # too late: the name is taken

    def _draw(self, operation: str, name: str) -> tuple[Effect, StoreError]:
        faults = self.faults
        error: StoreError = StoreUnavailableError(f"fault was injected. operation={operation}, name={name}")
        if self.is_down:
            return Effect.ERROR_BEFORE, error
        draw = self.source.random()
        if draw >= faults.error_before + faults.error_after + faults.late:
            return Effect.NORMAL, error
        if operation == "create" and self.source.random() < faults.says_exists:
            error = ObjectExistsError(f"fault was injected. name={name}")
        elif operation in CHANGES and self.source.random() < faults.says_full:
            error = StoreFullError(f"fault was injected. name={name}")
        if draw < faults.error_before:
            return Effect.ERROR_BEFORE, error
        return (Effect.ERROR_AFTER if draw < faults.error_before + faults.error_after else Effect.LATE), error

    def _latency_s(self) -> float:
        bounds = self.faults.slow_s if self.source.random() < self.faults.slow else self.faults.latency_s
        return self.source.uniform(*bounds)

    def _dies_now(self) -> bool:
        if self._left is None:
            return False
        self._left -= 1
        return self._left == 0

    def _die(self) -> None:
        self.process.kill()
        asyncio.get_running_loop().call_soon(self.on_kill, context=OUTSIDE)


def _set_answer(answer: asyncio.Future[Any], result: Any, failure: StoreError | None) -> None:
    if answer.done():
        return
    if failure is None:
        answer.set_result(result)
    else:
        answer.set_exception(failure)
