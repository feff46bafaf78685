"""How the client calls a syncer: over which transport, with which deadlines, and how often again."""

from __future__ import annotations

import math
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

from skerry.client.errors import TryAgainError
from skerry.client.transport import Transport
from skerry.runtime.retry import RetrySettings, retry

R = TypeVar("R")


@dataclass(frozen=True)
class Calls:
    """A transport and the rules of calling over it."""

    transport: Transport
    jitter: random.Random
    retry: RetrySettings = field(default_factory=RetrySettings)
    timeout_s: float = 20.0  # of a unary call
    stall_timeout_s: float = 60.0  # of a transfer, which may take as long as it likes while bytes move
    hopeless_reasons: frozenset[str] = frozenset()  # of a TryAgainError that this caller reports at once

    async def repeat(self, call: Callable[[], Awaitable[R]]) -> R:
        """Returns the result of an idempotent call, repeated on TryAgainError within the bounds of `retry`.

        Raises:
            SkerryError: the last attempt's.
        """
        return await retry(call, self.retry, self.jitter, is_worth_it=self._is_worth_it)

    async def persist(
        self,
        call: Callable[[], Awaitable[R]],
        *,
        is_worth_it: Callable[[BaseException], bool] | None = None,
        timeout_s: float = math.inf,
        has_progressed: Callable[[], bool] = lambda: False,
        before_pause: Callable[[int, BaseException], None] = lambda _attempt, _error: None,
    ) -> R:
        """As `repeat`, however many attempts it takes within `timeout_s`; the arguments are those of `retry`."""
        return await retry(
            call,
            replace(self.retry, attempt_count=None),
            self.jitter,
            is_worth_it=is_worth_it or self._is_worth_it,
            timeout_s=timeout_s,
            has_progressed=has_progressed,
            before_pause=before_pause,
        )

    def _is_worth_it(self, error: BaseException) -> bool:
        return isinstance(error, TryAgainError) and error.reason not in self.hopeless_reasons
