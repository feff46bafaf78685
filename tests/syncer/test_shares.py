"""Work in threads is done for all in turns, however much one of them has."""

from __future__ import annotations

import asyncio
import random
from contextlib import closing
from threading import Event

from skerry.runtime.workers import BEHALF, ThreadWorkers

_LONGEST_S = 20.0


async def _begun(workers: ThreadWorkers, behalf: str, done: list[str], count: int) -> list[asyncio.Task[None]]:
    """Asks for so many jobs, each of which says in `done` that it is at work."""
    BEHALF.set(behalf)
    tasks = [asyncio.create_task(workers.run(done.append, behalf)) for _ in range(count)]
    await asyncio.sleep(0)
    return tasks


async def test_who_has_one_job_does_not_wait_for_all_of_another() -> None:
    done, held = list[str](), Event()
    with closing(ThreadWorkers(1)) as workers:
        holding = asyncio.create_task(workers.run(held.wait, _LONGEST_S))
        await asyncio.sleep(0)
        tasks = await asyncio.create_task(_begun(workers, "many", done, 100))
        tasks += await asyncio.create_task(_begun(workers, "one", done, 1))
        tasks += await asyncio.create_task(_begun(workers, "two", done, 2))
        held.set()
        await asyncio.gather(holding, *tasks)
    # The pool had two more by then; from there on all take turns.
    assert done[:8] == ["many", "many", "many", "one", "two", "many", "two", "many"]
    assert sorted(done) == [*["many"] * 100, "one", "two", "two"]


async def test_jobs_that_are_cancelled_at_any_moment_leave_their_turn_to_others() -> None:
    source = random.Random(1)
    with closing(ThreadWorkers(1)) as workers:

        async def cancelled(behalf: str) -> None:
            BEHALF.set(behalf)
            task = asyncio.create_task(workers.run(len, behalf))
            for _ in range(source.randrange(8)):
                await asyncio.sleep(0)
            task.cancel()

        async with asyncio.timeout(_LONGEST_S):
            for number in range(1000):
                await asyncio.gather(*(cancelled(f"{number} {of}") for of in range(8)))
            assert await asyncio.gather(*(workers.run(len, "again") for _ in range(10))) == [5] * 10
