"""A clock that stands still."""

from __future__ import annotations

from skerry.runtime.clock import SystemClock


class StillClock(SystemClock):
    """Stands still until it is moved."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 100.0

    def monotonic_s(self) -> float:
        return self.now_s
