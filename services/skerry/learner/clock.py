"""The time that a training loop reads and waits by, as an argument, so that a test can hold it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final, Protocol

_SCHEDULING: Final = Path("/proc/thread-self/schedstat")


class Clock(Protocol):
    """What the loop needs of time."""

    def monotonic_s(self) -> float:
        """Seconds since an arbitrary moment; never goes back."""
        ...

    def unix_s(self) -> float:
        """Seconds since 1970, which may jump; only written down, never computed with."""
        ...

    def thread_cpu_s(self) -> float:
        """Processor seconds that the calling thread has used."""
        ...

    def thread_queued_s(self) -> float:
        """Seconds that the calling thread has waited for a processor, ready to run; 0 where nobody counts them."""
        ...

    def sleep(self, seconds: float) -> None:
        """Wait at least that long, or not at all where `seconds` is zero or less."""
        ...


class SystemClock:
    """The machine's own time."""

    def monotonic_s(self) -> float:
        """Seconds of the machine's highest-resolution monotonic counter."""
        return time.perf_counter()

    def unix_s(self) -> float:
        """Seconds since 1970 by the machine's calendar clock."""
        return time.time()

    def thread_cpu_s(self) -> float:
        """Processor seconds of the calling thread."""
        return time.thread_time()

    def thread_queued_s(self) -> float:
        """What Linux counts in the thread's `schedstat`; 0 on other systems."""
        try:
            return int(_SCHEDULING.read_bytes().split()[1]) / 1e9
        except (OSError, IndexError, ValueError):
            return 0.0

    def sleep(self, seconds: float) -> None:
        """Suspend this thread."""
        if seconds > 0:
            time.sleep(seconds)
