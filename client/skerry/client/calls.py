"""How the client calls a syncer: over which transport, with which deadlines, and how often again."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from skerry.client.transport import Transport
from skerry.runtime.retry import Retry

R = TypeVar("R")


@dataclass(frozen=True)
class Calls:
    """A transport and the rules of calling over it."""

    transport: Transport
    retry: Retry
    timeout_s: float = 20.0  # of a unary call
    stall_timeout_s: float = 60.0  # of a transfer, which may take any time as long as bytes move

    async def repeat(self, call: Callable[[], Awaitable[R]]) -> R:
        """Returns the result of an idempotent call, repeated by the rule of `retry`."""
        return await self.retry.call(call)

    @property
    def endless(self) -> Retry:
        """The rule of `retry` without a bound on attempts."""
        return replace(self.retry, settings=replace(self.retry.settings, attempt_count=None))
