"""The one place that reads real clocks; everything else is given a clock."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class StepClock(Protocol):
    """What measuring a training step needs of a clock."""

    def monotonic_s(self) -> float:
        """Returns seconds that never go back; only differences on one machine mean something."""


class Clock(StepClock, Protocol):
    """Time as an event loop's tasks see it. Simulations pass one of their own."""

    def unix_s(self) -> float:
        """Returns seconds since 1970 by the machine's calendar clock: for people, never for decisions."""

    async def sleep(self, duration_s: float) -> None:
        """Returns after `duration_s` seconds of this clock."""


class ThreadClock(StepClock, Protocol):
    """Time as a training thread sees it."""

    def unix_s(self) -> float:
        """Returns seconds since 1970 by the machine's calendar clock: for people, never for decisions."""

    def block(self, duration_s: float) -> None:
        """Suspends the calling thread for `duration_s` seconds; returns at once if that is zero or less."""


class SystemClock:
    """The machine's own clocks, for event loops and for threads."""

    def monotonic_s(self) -> float:
        """Returns seconds of the machine's highest-resolution monotonic counter."""
        return time.perf_counter()

    def unix_s(self) -> float:
        """Returns seconds since 1970."""
        return time.time()

    async def sleep(self, duration_s: float) -> None:
        """Sleeps on the running loop."""
        await asyncio.sleep(duration_s)

    def block(self, duration_s: float) -> None:
        """Suspends this thread."""
        if duration_s > 0:
            time.sleep(duration_s)
