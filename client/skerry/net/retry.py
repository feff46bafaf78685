"""Repeats calls that fail: bounded, jittered, and as late as a server asks where it asks."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

R = TypeVar("R")


@dataclass(frozen=True)
class RetrySettings:
    """How often a failed call is repeated, and how long the pauses between are."""

    attempt_count: int | None = 5
    """Attempts in all; None: no bound but the caller's cancellation or timeout."""
    first_wait_s: float = 0.2
    longest_wait_s: float = 5.0

    def wait_s(self, attempt: int, error: Exception | None, jitter: random.Random) -> float:
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
    is_worth_it: Callable[[Exception], bool]
    """Whether an error may go away by itself; any other is raised at once."""
    has_progressed: Callable[[], bool] = lambda: False
    """Asked after each failure; where it is true, that failure counts as the first."""
    before_pause: Callable[[int, Exception], None] = lambda _attempt, _error: None
    """Hears the attempt's number and error before each pause."""

    async def call(self, call: Callable[[], Awaitable[R]], *, timeout_s: float = math.inf) -> R:
        """Returns the result of `call`; no attempt begins later than `timeout_s` after the first.

        Raises:
            Exception: the last attempt's.
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        attempt = 0
        while True:
            attempt += 1
            try:
                return await call()
            except Exception as error:
                if not self.is_worth_it(error):
                    raise
                if self.has_progressed():
                    attempt = 1
                pause_s = self.settings.wait_s(attempt, error, self.jitter)
                if attempt == self.settings.attempt_count or loop.time() + pause_s > deadline_s:
                    raise
                self.before_pause(attempt, error)
            await asyncio.sleep(pause_s)
