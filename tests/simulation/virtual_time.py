"""An asyncio loop whose clock jumps to the next timer: hours pass in milliseconds, in one reproducible order."""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from typing import Any, Final, Protocol, TypeVar

T = TypeVar("T")

# Timers this close together are of one moment: what float64 loses in a day of virtual time is less.
_MOMENT_S: Final = 1e-9
# As in asyncio: so many timers, more than half of them cancelled, are worth sorting out.
_WORTH_SORTING: Final = 100


class Gate(Protocol):
    """What may hold back the callbacks of a context."""

    is_running: bool

    def hold(self, handle: asyncio.Handle) -> None:
        """Keeps a callback that came due."""


# Of a context: whoever is asked before each of its callbacks.
GATE: Final[ContextVar[Gate | None]] = ContextVar("gate", default=None)


class DeadlockError(RuntimeError):
    """Every task waits, and no timer is set: nothing would ever happen again."""


class _Handle(asyncio.TimerHandle):
    """A callback and the gate that it passes; without what asyncio keeps for debugging."""

    __slots__ = ("gate",)
    _loop: VirtualTimeLoop
    _when: float
    _callback: Any
    _args: Any

    def __init__(self, callback: Any, args: Any, context: Context) -> None:
        self._callback = callback
        self._args = args
        self._context = context
        self._cancelled = self._scheduled = False
        self.gate = context.get(GATE)

    def cancel(self) -> None:
        if not self._cancelled:
            self._cancelled = True
            if self._scheduled:
                self._loop._timer_cancelled_count += 1
            self._callback = self._args = None

    # The heap compares handles only where their moments are equal: then none comes first, and no two are the same.
    __eq__, __hash__ = object.__eq__, object.__hash__

    def __lt__(self, other: object) -> bool:
        return False


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop on virtual time, from 0; `run_until_complete` returns as fast as the work in it allows.

    It is asyncio's loop, in the same order, without what no simulation has: sockets, threads and debugging.
    """

    _ready: deque[_Handle]
    _scheduled: list[tuple[float, _Handle]]
    _stopping: bool
    _timer_cancelled_count: int

    def __init__(self) -> None:
        super().__init__()
        self._now_s = 0.0

    def time(self) -> float:
        """Returns the virtual seconds since the loop was made."""
        return self._now_s

    def call_soon(  # type: ignore[override]  # typeshed ties the arguments to the callback's
        self, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """Runs the callback next, or when its gate lets it."""
        handle = _Handle(callback, args, copy_context() if context is None else context)
        self._ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]  # as above

    def call_later(  # type: ignore[override]  # typeshed ties the arguments to the callback's
        self, delay: float, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Runs the callback after `delay` seconds, or when its gate lets it after that."""
        return self.call_at(self._now_s + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]  # typeshed ties the arguments to the callback's
        self, when: float, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Runs the callback at `when`, or when its gate lets it after that."""
        handle = _Handle(callback, args, copy_context() if context is None else context)
        handle._when, handle._scheduled, handle._loop = when, True, self
        heapq.heappush(self._scheduled, (when, handle))
        return handle

    def _run_once(self) -> None:
        """Lets the clock jump to the next timer if nothing is ready, and runs what is."""
        ready, scheduled = self._ready, self._without_cancelled()
        if not ready and not self._stopping:
            if not scheduled:
                raise DeadlockError("every task waits for something that no timer will bring")
            self._now_s += max(0.0, scheduled[0][0] - self._now_s)
        moment_s = self._now_s + _MOMENT_S
        while scheduled and scheduled[0][0] < moment_s:
            _, handle = heapq.heappop(scheduled)
            handle._scheduled = False
            ready.append(handle)
        for _ in range(len(ready)):
            handle = ready.popleft()
            if handle._cancelled:
                continue
            gate = handle.gate
            if gate is not None and not gate.is_running:
                gate.hold(handle)
                continue
            try:
                handle._context.run(handle._callback, *handle._args)
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as error:  # noqa: BLE001 - as asyncio's loop does
                self.call_exception_handler({"message": "callback failed", "exception": error})

    def _without_cancelled(self) -> list[tuple[float, _Handle]]:
        """Returns the timers that are set, the next one first and not cancelled."""
        scheduled = self._scheduled
        if len(scheduled) > _WORTH_SORTING and self._timer_cancelled_count > len(scheduled) / 2:
            self._scheduled = scheduled = [timer for timer in scheduled if not timer[1]._cancelled]
            heapq.heapify(scheduled)
            self._timer_cancelled_count = 0
        while scheduled and scheduled[0][1]._cancelled:
            _, handle = heapq.heappop(scheduled)
            handle._scheduled = False
            self._timer_cancelled_count -= 1
        return scheduled


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
