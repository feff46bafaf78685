"""Where CPU work and blocking calls run, so that the event loop never waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar, TypeVarTuple

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")


class Workers(Protocol):
    """Runs functions away from the event loop."""

    async def run(self, function: Callable[[*Arguments], Result], *args: *Arguments) -> Result:
        """Returns what `function(*args)` returns, or raises what it raises.

        If the caller is cancelled, the function still runs to its end; its result is dropped.
        """


class ThreadWorkers:
    """A pool of threads; work that is to run in parallel has to release the GIL."""

    def __init__(self, count: int, *, name: str = "skerry") -> None:
        self._pool = ThreadPoolExecutor(max_workers=count, thread_name_prefix=name)

    async def run(self, function: Callable[[*Arguments], Result], *args: *Arguments) -> Result:
        """Runs `function` in the next free thread."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *args)

    def close(self) -> None:
        """Waits for what is running and ends the threads; what had not begun is dropped."""
        self._pool.shutdown(wait=True, cancel_futures=True)


class InlineWorkers:
    """Runs everything at once, in the caller: for simulations, where threads would make a history unrepeatable."""

    async def run(self, function: Callable[[*Arguments], Result], *args: *Arguments) -> Result:
        """Runs `function` before returning to the loop."""
        return function(*args)
