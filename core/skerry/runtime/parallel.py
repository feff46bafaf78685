"""Jobs on worker threads, a bounded number of them in flight, while the event loop goes on reading."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Final, TypeVar

from skerry.runtime.workers import Workers

T = TypeVar("T")

# Jobs that are waiting or at work for one caller: enough that no thread waits for the loop, and what bounds memory.
IN_FLIGHT: Final = 6


async def run_jobs(workers: Workers, jobs: AsyncIterator[Callable[[], T]]) -> list[T]:
    """Runs every job and returns their results in the order in which the jobs came.

    Jobs may overlap. The next one is asked for only when fewer than `IN_FLIGHT` are unfinished. When a job or the
    iterator fails, the others are cancelled and the first error is raised as it is; a job that a thread has begun
    still runs to its end, so what it writes to is of no use after an error.
    """
    slots = asyncio.Semaphore(IN_FLIGHT)
    tasks: list[asyncio.Task[T]] = []

    async def run(job: Callable[[], T]) -> T:
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
