"""What the training thread does at a step boundary: work of the event loop, and a look at how the weights have moved.

The event loop calls `run`. The training thread does the work inside `step` (`work`), or at once while it flushes
(`serve`).

`Movement` notices weights that something other than training has replaced in place, before a delta is made of them. The
training thread takes a sample of them at every step, and waits for no GPU; a worker looks at the samples when a delta
is due. What is compared, and why, is in `skerry.algorithm.schedule`.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Final, TypeVar

import numpy as np

from skerry.algorithm.rebase import FlatArray
from skerry.algorithm.schedule import MOVES_AFTER, MOVES_BEFORE, Move, find_jump, move, squares
from skerry.client.errors import StopExchangingError
from skerry.client.parameters import Parameters
from skerry.runtime.clock import StepClock

R = TypeVar("R")

# Once so much time is used in one step, waiting work is left for the next. It is far below what a step takes, and one
# piece of work is always done.
BUDGET_S: Final = 0.004
# Steps between two deltas, of all fragments, that are kept: 3 KiB each.
_LONGEST_WAIT: Final = 4096


class Boundary:
    """A queue from the event loop to the training thread; `post` runs a callback on the loop from any thread."""

    def __init__(self, clock: StepClock, post: Callable[[Callable[[], None]], object]) -> None:
        self._clock = clock
        self._post = post
        self._waiting: deque[tuple[Callable[[], Any], asyncio.Future[Any]]] = deque()
        self._has_work = threading.Event()

    async def run(self, work: Callable[[], R]) -> R:
        """Returns `work()`, done by the training thread at a step boundary."""
        future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._waiting.append((work, future))
        self._has_work.set()
        return await future

    def wake(self) -> None:
        """Ends a wait in `serve`; for any thread."""
        self._has_work.set()

    def work(self) -> bool:
        """Does waiting work within the budget, at least one piece. For the training thread, at a step boundary.

        Returns whether there was any.
        """
        has_worked = bool(self._waiting)
        deadline_s = self._clock.monotonic_s() + BUDGET_S
        while self._waiting:
            self._do(*self._waiting.popleft())
            if self._clock.monotonic_s() >= deadline_s:
                break
        return has_worked

    def serve(self, is_over: Callable[[], bool], timeout_s: float) -> bool:
        """Does work as it comes until `is_over()` or the timeout; returns `is_over()`. For the training thread."""
        deadline_s = self._clock.monotonic_s() + timeout_s
        while not is_over():
            rest_s = deadline_s - self._clock.monotonic_s()
            if rest_s <= 0 or not self._has_work.wait(rest_s):
                return is_over()
            self._has_work.clear()
            while self._waiting:
                self._do(*self._waiting.popleft())
        return True

    def _do(self, work: Callable[[], Any], future: asyncio.Future[Any]) -> None:
        if future.cancelled():
            return
        try:
            result = work()
        except Exception as error:  # noqa: BLE001 - handed to the task that asked; training goes on
            failure = error
            self._post(lambda: None if future.done() else future.set_exception(failure))
        else:
            self._post(lambda: None if future.done() else future.set_result(result))


class Movement:
    """How a model's weights have moved lately."""

    def __init__(self, parameters: Parameters) -> None:
        """Call `settle` before the first step."""
        self._parameters = parameters
        self._last: FlatArray = None
        # The training thread appends, and a worker takes.
        self._taken: deque[tuple[int, tuple[FlatArray, ...]]] = deque(maxlen=_LONGEST_WAIT)
        self._moves: list[Move] = []
        self._cleared = 0  # of `_moves`: they are only what others are compared with
        self._lock = threading.Lock()  # of these two: each fragment's worker may ask

    def settle(self) -> None:
        """Takes note that the exchange itself may have changed the weights."""
        self._last = self._parameters.sample()

    def trained(self, step: int) -> None:
        """Takes note that the training loop has changed the weights, in its step of this number."""
        now = self._parameters.sample()
        self._taken.append((step, squares(self._last, now)))
        self._last = now

    def is_clear(self) -> bool:
        """Returns whether training explains how the weights moved; False if the next steps will tell. In a worker.

        Raises:
            StopExchangingError: WEIGHTS_REPLACED: it does not.
        """
        with self._lock:
            new = [self._taken.popleft() for _ in range(len(self._taken))]
            self._parameters.synchronize()
            for step, squared in new:
                one = move(step, *map(self._parameters.to_host, squared))
                if np.any(one.distances):
                    self._moves.append(one)
            jump = find_jump(self._moves, self._cleared)
            if jump is None:
                self._cleared = max(0, len(self._moves) - MOVES_AFTER)
                outdated = max(0, self._cleared - MOVES_BEFORE)
                del self._moves[:outdated]
                self._cleared -= outdated
                return True
        if jump.is_certain:
            raise StopExchangingError(
                "WEIGHTS_REPLACED",
                "the weights were replaced after attaching: load your checkpoint first, then attach; the run's weights "
                "win. In one step, most of them moved many times as far as in any step near it. "
                f"step={jump.step}",
            )
        return False
