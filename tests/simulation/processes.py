"""Operating-system processes inside one event loop: each can be stopped, continued and killed between two callbacks.

A process is a context: whatever is started in it stays in it, tasks, timers and callbacks alike. The loop asks before
each of them whether its process runs. One that is stopped (SIGSTOP) gets no time until it goes on, then all that was
due; one that was killed never runs again, not even a `finally`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextvars import Context, copy_context
from typing import Any, Final

from tests.simulation.virtual_time import GATE, VirtualTimeLoop

# The context of everything that belongs to no process: the network, the store, the disturbances.
OUTSIDE: Final = Context()


class Process:
    """One process; made inside a running `ProcessLoop`."""

    def __init__(self, name: str) -> None:
        """Starts alive."""
        self.name = name
        self.is_alive = True
        self.is_stopped = False
        self.is_running = True  # whether it gets time: alive and not stopped
        self.stop_count = 0
        self._is_buried = False
        self._loop = asyncio.get_running_loop()
        self._held: list[asyncio.Handle] = []
        self._tasks: list[asyncio.Task[Any]] = []
        self._context = OUTSIDE.copy()
        self._context.run(GATE.set, self)

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Starts a task in this process."""
        return self._loop.create_task(coroutine, context=self._context.copy())

    def stop(self) -> None:
        """Takes all time from it, as SIGSTOP does."""
        self.is_stopped, self.is_running = True, False
        self.stop_count += 1

    def go_on(self) -> None:
        """Gives it time again; callbacks that came due meanwhile run first."""
        self.is_stopped, self.is_running = False, self.is_alive
        self._release()

    def kill(self) -> None:
        """Ends it at once, as SIGKILL does; a history's end is not disturbed any more."""
        if not self._is_buried:
            self.is_alive = self.is_running = False

    def bury(self) -> None:
        """Lets the tasks of a dead process end after a history, so that nothing is left pending."""
        self.is_alive, self.is_stopped, self.is_running, self._is_buried = True, False, True, True
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


class ProcessLoop(VirtualTimeLoop):
    """A virtual-time loop that knows processes."""

    def __init__(self) -> None:
        super().__init__()
        self.set_task_factory(_owned_task)


def _owned_task(
    loop: asyncio.AbstractEventLoop, coroutine: Any, *, context: Context | None = None
) -> asyncio.Task[Any]:
    context = copy_context() if context is None else context
    task: asyncio.Task[Any] = asyncio.Task(coroutine, loop=loop, context=context)
    process = context.get(GATE)
    if isinstance(process, Process):
        process.own(task)
    return task
