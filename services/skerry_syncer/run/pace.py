"""How often a replica reads the store: less often, the longer a run has been quiet.

A replica looks again after a sixteenth of the quiet time, so it sees a change late by that at most. A run in which
nothing happens for a day is looked at some hundred times in its first hour, and then as rarely as the settings allow.
In a bucket each look is paid for.
"""

from __future__ import annotations

import asyncio
import math
from contextlib import suppress
from typing import Final

from skerry.runtime.clock import Clock

_SHARE: Final = 16


class Pace:
    """The quiet time of one run on one replica."""

    def __init__(self, clock: Clock) -> None:
        """Begins as quiet as can be: who opens a run for work wakes it."""
        self._clock = clock
        self._active_at_s = -math.inf

    def touch(self) -> bool:
        """Says that something happened; returns whether the run had been quiet, so that waiting loops should wake."""
        now_s = self._clock.monotonic_s()
        was_quiet = now_s - self._active_at_s > _SHARE
        self._active_at_s = now_s
        return was_quiet

    def pause_s(self, least_s: float, most_s: float) -> float:
        """Returns how long to wait before the next look, `least_s` to `most_s`."""
        return max(least_s, min(most_s, (self._clock.monotonic_s() - self._active_at_s) / _SHARE))


async def wait(event: asyncio.Event, timeout_s: float | None) -> None:
    """Returns when the event is set, or after `timeout_s`."""
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
