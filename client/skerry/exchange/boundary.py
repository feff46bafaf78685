"""Work that the event loop hands to the training thread, to be done at a step boundary.

The event loop calls `run`. The training thread does the work inside `step` (`work`), or at once while it flushes
(`serve`).
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Final, TypeAlias, TypeVar

from skerry.errors import StopExchangingError
from skerry.runtime.clock import StepClock

R = TypeVar("R")
Post: TypeAlias = Callable[[Callable[[], None]], object]  # runs a callback on the event loop, from any thread

# Once so much time is used in one step, waiting work is left for the next. It is far below what a step takes, and one
# piece of work is always done.
BUDGET_S: Final = 0.004


class Boundary:
    """A queue from the event loop to the training thread."""

    def __init__(self, clock: StepClock, post: Post) -> None:
        self.clock = clock
        self.post = post
        self._waiting: deque[tuple[Callable[[], Any], asyncio.Future[Any]]] = deque()
        self._has_work = threading.Event()

    async def run(self, work: Callable[[], R], *, is_common: bool = False) -> R:
        """Returns `work()`, done by the training thread at a step boundary.

        Of a learner of several processes, common work is done by all of them at the same one.
        """
        future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._waiting.append((work, future))
        self._has_work.set()
        return await future

    def wake(self) -> None:
        """Ends a wait in `serve`; for any thread."""
        self._has_work.set()

    def work(self) -> None:
        """Does waiting work within the budget, at least one piece. For the training thread, at a step boundary."""
        deadline_s = self.clock.monotonic_s() + BUDGET_S
        while self._waiting:
            self._do_next()
            if self.clock.monotonic_s() >= deadline_s:
                break

    def serve(self, is_over: Callable[[], bool], timeout_s: float) -> bool:
        """Does work as it comes until `is_over()` or the timeout; returns `is_over()`. For the training thread."""
        deadline_s = self.clock.monotonic_s() + timeout_s
        while not is_over():
            rest_s = deadline_s - self.clock.monotonic_s()
            if rest_s <= 0 or not self._has_work.wait(rest_s):
                return is_over()
            self._has_work.clear()
            while self._waiting:
                self._do_next()
        return True

    def _do_next(self) -> None:
        work, future = self._waiting[0]
        try:
            self._waiting.popleft()
            result = None if future.cancelled() else work()
        except BaseException as error:  # Ctrl-C may have come in the middle of it
            failure = error if isinstance(error, Exception) else _interrupted(error)
            self.post(lambda: None if future.done() else future.set_exception(failure))
            if failure is not error:
                raise
        else:
            self.post(lambda: None if future.done() else future.set_result(result))


def _interrupted(error: BaseException) -> StopExchangingError:
    return StopExchangingError(
        "INTERRUPTED",
        "the training thread was interrupted while it copied or changed weights, so nobody knows what they hold: to go "
        f"on, attach again. by={error!r}",
    )
