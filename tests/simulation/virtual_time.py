"""An asyncio loop whose clock jumps to the next timer: hours pass in milliseconds, in one reproducible order."""

from __future__ import annotations

import asyncio
import heapq
import selectors
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar
from typing import Any, Final, Protocol, TypeVar

T = TypeVar("T")

# Timers this close together are of one moment: what float64 loses in a day of virtual time is less.
_MOMENT_S: Final = 1e-9


class Gate(Protocol):
    """What may hold back the callbacks of a context."""

    is_running: bool

    def hold(self, handle: asyncio.Handle) -> None:
        """Keeps a callback that came due."""


# Of a context: whoever is asked before each of its callbacks.
GATE: Final[ContextVar[Gate | None]] = ContextVar("gate", default=None)


class DeadlockError(RuntimeError):
    """Every task waits, and no timer is set: nothing would ever happen again."""


class _Handle(asyncio.Handle):
    _context: Context

    def _run(self) -> None:
        """Runs the callback, or has its gate keep it."""
        gate = self._context.get(GATE)
        if gate is None or gate.is_running:
            super()._run()
        else:
            gate.hold(self)


class _TimerHandle(_Handle, asyncio.TimerHandle):
    _scheduled: bool


class _Jump(selectors.DefaultSelector):
    """Waits for nothing: the clock jumps instead."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        """Lets so much time pass.

        Raises:
            DeadlockError: nothing is awaited but what no timer will bring.
        """
        if timeout is None:
            raise DeadlockError("every task waits for something that no timer will bring")
        self.now_s += timeout
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop on virtual time, from 0; `run_until_complete` returns as fast as the work in it allows."""

    _ready: list[asyncio.Handle]
    _scheduled: list[asyncio.TimerHandle]

    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)
        self._clock_resolution = _MOMENT_S

    def time(self) -> float:
        """Returns the virtual seconds since the loop was made."""
        return self._jump.now_s

    def _call_soon(self, callback: Any, args: Any, context: Context | None) -> asyncio.Handle:
        handle = _Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_at(  # type: ignore[override]  # typeshed ties the arguments to the callback's
        self, when: float, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Runs the callback at `when`, or when its gate lets it after that."""
        timer = _TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._scheduled, timer)
        timer._scheduled = True
        return timer


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
