"""An asyncio loop whose clock jumps to the next timer: hours pass in milliseconds, in one reproducible order."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _JumpingSelector(selectors.DefaultSelector):
    """A selector that never waits: asked to wait, it moves the clock on by that long."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise DeadlockError("every task waits for something that no timer will bring")
        if timeout > 0:
            self.now_s += timeout
        return []  # nothing outside ever happens: there are no sockets and no threads


class DeadlockError(RuntimeError):
    """Every task waits, and no timer is set: nothing would ever happen again."""


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop on virtual time, from 0; `run_until_complete` returns as fast as the work in it allows."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)
        # The stock loop treats timers within its clock's resolution as due; virtual time needs no slack.
        self._clock_resolution = 1e-9

    def time(self) -> float:
        """Returns the virtual seconds since the loop was made."""
        return self._jumping.now_s


def run_virtual(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Runs `main()` to its end on a fresh virtual-time loop and returns its result."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main())


class VirtualClock:
    """The services' clock on the running loop's virtual time; its wall clock may be wrong by any offset."""

    def __init__(self, *, unix_offset_s: float = 1.7e9) -> None:
        self._unix_offset_s = unix_offset_s

    def monotonic_s(self) -> float:
        """Returns virtual seconds."""
        return asyncio.get_running_loop().time()

    def unix_s(self) -> float:
        """Returns this process's wall clock, which may be wrong."""
        return self.monotonic_s() + self._unix_offset_s

    async def sleep(self, seconds: float) -> None:
        """Waits for virtual seconds."""
        await asyncio.sleep(seconds)
