"""How often and how long a failed call is repeated: bounded, jittered, and as the server says where it says so."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, stop_after_attempt

from skerry.client.errors import SkerryError, TryAgainError

R = TypeVar("R")


@dataclass(frozen=True)
class RetrySettings:
    """Bounds of one call's repetitions."""

    attempt_count: int = 5
    first_wait_s: float = 0.2
    longest_wait_s: float = 5.0
    hopeless_reasons: frozenset[str] = frozenset()
    """Reasons that this caller does not repeat, though the call would bear it."""

    def wait_s(self, attempt: int, error: BaseException | None, jitter: random.Random) -> float:
        """Returns the pause after attempt number `attempt` (from 1): doubling, spread over half of itself.

        A pause that the server asked for wins; it is spread upwards only.
        """
        if isinstance(error, SkerryError) and error.retry_after_s is not None:
            return error.retry_after_s * jitter.uniform(1.0, 1.25)
        pause_s = min(self.longest_wait_s, self.first_wait_s * 2.0 ** min(attempt - 1, 30))
        return pause_s * jitter.uniform(0.5, 1.0)


# One attempt, for callers that would rather say at once that nobody answers.
NO_RETRY = RetrySettings(attempt_count=1)


async def repeat(call: Callable[[], Awaitable[R]], settings: RetrySettings, jitter: random.Random) -> R:
    """Returns the result of an idempotent call, repeated while its error says "try again" and the bounds allow it.

    Raises:
        SkerryError: the last attempt's.
    """

    def wait(state: RetryCallState) -> float:
        error = state.outcome.exception() if state.outcome is not None else None
        return settings.wait_s(state.attempt_number, error, jitter)

    def is_worth_it(error: BaseException) -> bool:
        return isinstance(error, TryAgainError) and error.reason not in settings.hopeless_reasons

    attempts = AsyncRetrying(
        stop=stop_after_attempt(settings.attempt_count), wait=wait, retry=retry_if_exception(is_worth_it), reraise=True
    )
    async for attempt in attempts:
        with attempt:
            return await call()
    raise AssertionError("the last attempt returns or raises")
