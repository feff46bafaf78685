"""Where CPU work and blocking calls run, one by one or many at a time, so that the event loop never waits for them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
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


async def in_order(calls: Iterable[Callable[[], Awaitable[Result]]], count: int) -> AsyncGenerator[Result, None]:
    """Yields the results of the calls in their order; the next `count` of them are under way meanwhile."""
    tasks: deque[asyncio.Future[Result]] = deque()
    try:
        for call in calls:
            tasks.append(asyncio.ensure_future(call()))
            if len(tasks) == count:
                yield await tasks.popleft()
        while tasks:
            yield await tasks.popleft()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def run_jobs(workers: Workers, jobs: AsyncIterator[Callable[[], Result]]) -> list[Result]:
    """Runs every job and returns their results in the order in which the jobs came.

    Jobs may overlap. The next one is asked for only when fewer than `IN_FLIGHT` are unfinished. When a job or the
    iterator fails, the others are cancelled and the first error is raised as it is; a job that a thread has begun
    still runs to its end, so what it writes to is of no use after an error.
    """
    slots = asyncio.Semaphore(IN_FLIGHT)
    tasks: list[asyncio.Task[Result]] = []

    async def run(job: Callable[[], Result]) -> Result:
        try:
            return await workers.run(job)
        finally:
            slots.release()

    try:
        async with asyncio.TaskGroup() as group:
            async for job in jobs:
                await slots.acquire()
                tasks.append(group.create_task(run(job)))
    except BaseExceptionGroup as errors:
        raise _first(errors) from None
    return [task.result() for task in tasks]


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
