"""Repeats calls that fail: bounded, jittered, and as late as a server asks where it asks."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from tenacity import AsyncRetrying, RetryCallState, Retrying, retry_if_exception

R = TypeVar("R")


@dataclass(frozen=True)
class RetrySettings:
    """How often a failed call is repeated, and how long the pauses between are."""

    attempt_count: int | None = 5
    """Attempts in all; None: no bound but the caller's cancellation or timeout."""
    first_wait_s: float = 0.2
    longest_wait_s: float = 5.0

    def wait_s(self, attempt: int, error: BaseException | None, jitter: random.Random) -> float:
        """Returns the pause after attempt number `attempt` (from 1): doubling, spread over half of itself.

        Where the error has a number in `retry_after_s`, what the server asked for, that is the pause, spread upwards
        only.
        """
        asked_s = getattr(error, "retry_after_s", None)
        if isinstance(asked_s, int | float):
            return asked_s * jitter.uniform(1.0, 1.25)
        pause_s = min(self.longest_wait_s, self.first_wait_s * 2.0 ** min(attempt - 1, 30))
        return pause_s * jitter.uniform(0.5, 1.0)


@dataclass(frozen=True)
class Retry:
    """A rule by which idempotent calls are repeated: while `is_worth_it(error)` and the bounds allow it."""

    settings: RetrySettings
    jitter: random.Random
    is_worth_it: Callable[[BaseException], bool]
    """Whether an error may go away by itself; any other is raised at once."""
    has_progressed: Callable[[], bool] = lambda: False
    """Asked after each failure; where it is true, that failure counts as the first."""
    before_pause: Callable[[int, BaseException], None] = lambda _attempt, _error: None
    """Hears the attempt's number and error before each pause."""

    async def call(self, call: Callable[[], Awaitable[R]], *, timeout_s: float = math.inf) -> R:
        """Returns the result of `call`; no attempt begins later than `timeout_s` after the first.

        Raises:
            BaseException: the last attempt's.
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        async for attempt in AsyncRetrying(**self._rules(lambda pause_s: loop.time() + pause_s > deadline_s)):
            with attempt:
                return await call()
        raise AssertionError("the last attempt returns or raises")

    def attempts(self, *, sleep: Callable[[float], None], is_late: Callable[[float], bool]) -> Retrying:
        """Returns the attempts of a caller that is not asynchronous, for a `for` loop whose body is `with attempt:`.

        `is_late(pause_s)` says whether no attempt may follow a pause of `pause_s`.
        """
        return Retrying(sleep=sleep, **self._rules(is_late))

    def _rules(self, is_late: Callable[[float], bool]) -> dict[str, Any]:
        """Returns the arguments of tenacity's Retrying and AsyncRetrying."""

        def count(state: RetryCallState) -> None:
            if self.has_progressed():
                state.attempt_number = 1

        def is_last(state: RetryCallState) -> bool:
            bound = self.settings.attempt_count
            return (bound is not None and state.attempt_number >= bound) or is_late(state.upcoming_sleep)

        return {
            "retry": retry_if_exception(self.is_worth_it),
            "after": count,
            "wait": lambda state: self.settings.wait_s(state.attempt_number, _error(state), self.jitter),
            "stop": is_last,
            "before_sleep": lambda state: self.before_pause(state.attempt_number, _error(state)),
            "reraise": True,
        }


def _error(state: RetryCallState) -> BaseException:
    error = state.outcome.exception() if state.outcome is not None else None
    assert error is not None, "only failures are repeated"
    return error
