"""Operating-system processes inside one event loop: each can be stopped, continued and killed between two callbacks.

A process is a context: whatever is started in it stays in it, tasks, timers and callbacks alike. The loop asks before
each of them whether its process runs. One that is stopped (SIGSTOP) gets no time until it goes on, then all that was
due; one that was killed never runs again, not even a `finally`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from typing import Any, Final

from tests.simulation.virtual_time import VirtualTimeLoop

_CURRENT: Final[ContextVar[Process | None]] = ContextVar("process", default=None)
# The context of everything that belongs to no process: the network, the store, the disturbances.
OUTSIDE: Final = Context()


class Process:
    """One process; made inside a running `ProcessLoop`."""

    def __init__(self, name: str) -> None:
        """Starts alive."""
        self.name = name
        self.is_alive = True
        self.is_stopped = False
        self.stop_count = 0
        self._loop = asyncio.get_running_loop()
        self._held: list[asyncio.Handle] = []
        self._tasks: list[asyncio.Task[Any]] = []
        self._context = OUTSIDE.copy()
        self._context.run(_CURRENT.set, self)

    @property
    def is_running(self) -> bool:
        """Whether it gets time."""
        return self.is_alive and not self.is_stopped

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Starts a task in this process."""
        return self._loop.create_task(coroutine, context=self._context.copy())

    def stop(self) -> None:
        """Takes all time from it, as SIGSTOP does."""
        self.is_stopped = True
        self.stop_count += 1

    def go_on(self) -> None:
        """Gives it time again; callbacks that came due meanwhile run first."""
        self.is_stopped = False
        self._release()

    def kill(self) -> None:
        """Ends it at once, as SIGKILL does."""
        self.is_alive = False

    def bury(self) -> None:
        """Lets the tasks of a dead process end after a history, so that nothing is left pending."""
        self.is_alive, self.is_stopped = True, False
        self._release()

    def hold(self, handle: asyncio.Handle) -> None:
        """Keeps a callback that came due; a dead process's too: if it were collected, its coroutine would be closed."""
        self._held.append(handle)

    def own(self, task: asyncio.Task[Any]) -> None:
        """Keeps a task from being collected."""
        self._tasks.append(task)
        if len(self._tasks) > 256:
            self._tasks = [task for task in self._tasks if not task.done()]

    def _release(self) -> None:
        held, self._held = self._held, []
        self._loop._ready.extend(held)  # type: ignore[attr-defined]


class _Gate:
    """A callback that runs only while its process does."""

    __slots__ = ("args", "callback", "handle", "process")

    def __init__(self, process: Process, callback: Callable[..., object], args: tuple[Any, ...]) -> None:
        self.process = process
        self.callback = callback
        self.args = args
        self.handle: asyncio.Handle

    def __call__(self) -> None:
        if self.process.is_running:
            self.callback(*self.args)
        else:
            self.process.hold(self.handle)


class ProcessLoop(VirtualTimeLoop):
    """A virtual-time loop that knows processes."""

    def __init__(self) -> None:
        super().__init__()
        self.set_task_factory(_owned_task)

    def call_soon(  # type: ignore[override]  # typeshed ties the arguments to the callback's
        self, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """Runs the callback next, or when its process goes on."""
        context = copy_context() if context is None else context
        process = context.get(_CURRENT)
        if process is None:
            return super().call_soon(callback, *args, context=context)
        gate = _Gate(process, callback, args)
        gate.handle = super().call_soon(gate, context=context)
        return gate.handle

    def call_at(  # type: ignore[override]  # typeshed ties the arguments to the callback's
        self, when: float, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Runs the callback at `when`, or when its process goes on after that."""
        context = copy_context() if context is None else context
        process = context.get(_CURRENT)
        if process is None:
            return super().call_at(when, callback, *args, context=context)
        gate = _Gate(process, callback, args)
        handle = super().call_at(when, gate, context=context)
        gate.handle = handle
        return handle


def _owned_task(
    loop: asyncio.AbstractEventLoop, coroutine: Any, *, context: Context | None = None
) -> asyncio.Task[Any]:
    context = copy_context() if context is None else context
    task: asyncio.Task[Any] = asyncio.Task(coroutine, loop=loop, context=context)
    process = context.get(_CURRENT)
    if process is not None:
        process.own(task)
    return task
