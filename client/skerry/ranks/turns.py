"""Step boundaries of an island: the ranks do what waits for a boundary in turns, all of them at the same step.

An operation on the weights takes all ranks. So the ranks meet at every step, and each says whether its exchange has
work for the boundary. Then one after another does it, while the others take their part.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeVar

from skerry.exchange.boundary import Boundary
from skerry.ranks.parameters import IslandParameters
from skerry.runtime.clock import StepClock

R = TypeVar("R")

# Between two meetings of ranks that only wait, as while they flush.
_PAUSE_S: Final = 0.01


class Waiting(NamedTuple):
    """What waits for the boundary at one rank."""

    has_work: bool
    has_common_work: bool | None  # None: this rank exchanges nothing


class TurnBoundary(Boundary):
    """The queue from one rank's event loop to its training thread."""

    def __init__(
        self,
        clock: StepClock,
        post: Callable[[Callable[[], None]], object],
        *,
        rank: int,
        parameters: IslandParameters,
        meet: Callable[[bool, bool], tuple[bool, bool]],
    ) -> None:
        """`meet` is told of something whether it is over here, and late; returns whether it is so for all."""
        super().__init__(clock, post)
        self.exchanges = False  # this rank has fragments of its own
        self._rank = rank
        self._parameters = parameters
        self._meet = meet
        self._common: deque[tuple[Callable[[], Any], asyncio.Future[Any]]] = deque()
        self._turns: list[int] = []

    async def run(self, work: Callable[[], R], *, is_common: bool = False) -> R:
        """As `Boundary.run`; common work waits until every rank that exchanges has some, and is done at one step."""
        if not is_common:
            return await super().run(work)
        future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._common.append((work, future))
        self.wake()
        return await future

    @property
    def waiting(self) -> Waiting:
        """What waits here, which the other ranks hear of at the next meeting."""
        return Waiting(bool(self._waiting), bool(self._common) if self.exchanges else None)

    def take_turns(self, ranks: Sequence[Waiting]) -> None:
        """Has the next `work` do what waits, as the ranks have said at a meeting."""
        is_common = all(waiting.has_common_work is not False for waiting in ranks)
        if is_common and self.exchanges:
            self._waiting.appendleft(self._common.popleft())
        self._turns = [rank for rank, waiting in enumerate(ranks) if waiting.has_work or is_common]

    def work(self) -> None:
        """Does waiting work in this rank's turn, and takes part in the other ranks'."""
        turns, self._turns = self._turns, []
        for rank in turns:
            self.turn(rank, super().work)

    def turn(self, rank: int, work: Callable[[], R]) -> R | None:
        """Does work on the weights if it is this rank's turn, which is returned; else takes part in the rank's."""
        if rank != self._rank:
            self._parameters.obey(rank)
            return None
        result = work()
        self._parameters.end_turn()
        return result

    def serve(self, is_over: Callable[[], bool], timeout_s: float) -> bool:
        """As `Boundary.serve`, until it is over at all ranks; every rank calls it at the same time."""
        deadline_s = self.clock.monotonic_s() + timeout_s
        while True:
            is_late = self.clock.monotonic_s() >= deadline_s
            are_over, is_late = self._meet(is_over(), is_late)
            self.work()
            if are_over or is_late:
                return are_over
            self._has_work.wait(_PAUSE_S)
            self._has_work.clear()
