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


async def retry(
    call: Callable[[], Awaitable[R]],
    settings: RetrySettings,
    jitter: random.Random,
    *,
    is_worth_it: Callable[[BaseException], bool],
    timeout_s: float = math.inf,
    has_progressed: Callable[[], bool] = lambda: False,
    before_pause: Callable[[int, BaseException], None] = lambda _attempt, _error: None,
) -> R:
    """Returns the result of an idempotent call, repeated while `is_worth_it(error)` and the bounds allow it.

    Args:
        call: what may be repeated.
        settings: how often, and how long the pauses are.
        jitter: spreads the pauses.
        is_worth_it: whether an error may go away by itself; any other is raised at once.
        timeout_s: no attempt begins later than this after the first, by the event loop's clock.
        has_progressed: asked after each failure; where it is true, that failure counts as the first.
        before_pause: hears the attempt's number and error before each pause.

    Raises:
        BaseException: the last attempt's.
    """
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + timeout_s
    rules = _rules(
        settings,
        jitter,
        is_worth_it=is_worth_it,
        is_late=lambda pause_s: loop.time() + pause_s > deadline_s,
        has_progressed=has_progressed,
        before_pause=before_pause,
    )
    async for attempt in AsyncRetrying(**rules):
        with attempt:
            return await call()
    raise AssertionError("the last attempt returns or raises")


def attempts(
    settings: RetrySettings,
    jitter: random.Random,
    *,
    is_worth_it: Callable[[BaseException], bool],
    is_late: Callable[[float], bool],
    has_progressed: Callable[[], bool],
    before_pause: Callable[[int, BaseException], None],
    sleep: Callable[[float], None],
) -> Retrying:
    """Returns the attempts of a caller that is not asynchronous, for a `for` loop whose body is `with attempt:`.

    The arguments are those of `retry`; in place of the timeout, `is_late(pause_s)` says whether no attempt may follow
    a pause of `pause_s`.
    """
    rules = _rules(
        settings,
        jitter,
        is_worth_it=is_worth_it,
        is_late=is_late,
        has_progressed=has_progressed,
        before_pause=before_pause,
    )
    return Retrying(sleep=sleep, **rules)


def _rules(
    settings: RetrySettings,
    jitter: random.Random,
    *,
    is_worth_it: Callable[[BaseException], bool],
    is_late: Callable[[float], bool],
    has_progressed: Callable[[], bool],
    before_pause: Callable[[int, BaseException], None],
) -> dict[str, Any]:
    """Returns the arguments of tenacity's Retrying and AsyncRetrying."""

    def count(state: RetryCallState) -> None:
        if has_progressed():
            state.attempt_number = 1

    def is_last(state: RetryCallState) -> bool:
        is_used_up = settings.attempt_count is not None and state.attempt_number >= settings.attempt_count
        return is_used_up or is_late(state.upcoming_sleep)

    return {
        "retry": retry_if_exception(is_worth_it),
        "after": count,
        "wait": lambda state: settings.wait_s(state.attempt_number, _error(state), jitter),
        "stop": is_last,
        "before_sleep": lambda state: before_pause(state.attempt_number, _error(state)),
        "reraise": True,
    }


def _error(state: RetryCallState) -> BaseException:
    error = state.outcome.exception() if state.outcome is not None else None
    assert error is not None, "only failures are repeated"
    return error
