"""Where CPU work and blocking calls run, one by one or many at a time, so that the event loop never waits for them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from functools import partial
from typing import Final, Protocol, TypeVar, TypeVarTuple

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")

# Jobs that are waiting or at work for one caller: enough that no thread waits for the loop, and what bounds memory.
IN_FLIGHT: Final = 6


class Workers(Protocol):
    """Runs functions away from the event loop."""

    async def run(self, function: Callable[[*Arguments], Result], *args: *Arguments) -> Result:
        """Returns what `function(*args)` returns, or raises what it raises.

        If the caller is cancelled, the function still runs to its end; its result is dropped.
        """


class ThreadWorkers:
    """A pool of threads; work that is to run in parallel has to release the GIL."""

    def __init__(self, count: int, *, name: str = "skerry", initializer: Callable[[], object] | None = None) -> None:
        """`initializer` is called in each thread before its first job."""
        self._pool = ThreadPoolExecutor(max_workers=count, thread_name_prefix=name, initializer=initializer)

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


async def in_order(calls: AsyncIterable[Callable[[], Awaitable[Result]]], count: int) -> AsyncGenerator[Result, None]:
    """Yields the results of the calls in their order; the next `count` of them are under way meanwhile."""
    tasks: deque[asyncio.Future[Result]] = deque()
    try:
        async for call in calls:
            tasks.append(asyncio.ensure_future(call()))
            if len(tasks) == count:
                yield await tasks.popleft()
        while tasks:
            yield await tasks.popleft()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def run_jobs(workers: Workers, jobs: AsyncIterable[Callable[[], Result]]) -> list[Result]:
    """Runs every job, up to `IN_FLIGHT` at a time, and returns their results in the order in which the jobs came.

    When a job or the iterator fails, the others are cancelled; a job that a thread has begun still runs to its end, so
    what it writes to is of no use after an error.
    """
    calls = (partial(workers.run, job) async for job in jobs)
    async with aclosing(in_order(calls, IN_FLIGHT)) as results:
        return [result async for result in results]
