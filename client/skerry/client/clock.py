"""The one place of the client that reads real clocks."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """What the client needs of time outside of its event loop: to measure pauses of the training thread."""

    def monotonic_s(self) -> float:
        """Seconds since an arbitrary moment; never goes back."""


class SystemClock:
    """The machine's own time."""

    def monotonic_s(self) -> float:
        """Seconds of the machine's highest-resolution monotonic counter."""
        return time.perf_counter()
