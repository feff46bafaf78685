"""Work in threads is done for all in turns, however much one of them has."""

from __future__ import annotations

import asyncio
import random
from contextlib import closing
from threading import Event

import numpy as np

from skerry.runtime.workers import BEHALF, ThreadWorkers
from skerry_syncer.server import serving
from skerry_syncer.store.objects.interface import Chunks
from tests.integration.syncer.conftest import LOCAL
from tests.support.dict_objects import DictObjects
from tests.support.raw_learner import RawLearner, connected, create_run, layout, pull

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
    assert done[:6] == ["many", "one", "two", "many", "two", "many"]
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


class _Recording(DictObjects):
    """Notes on whose behalf each object is created."""

    def __init__(self) -> None:
        super().__init__()
        self.behalf: list[tuple[str, str]] = []

    async def create(self, name: str, data: bytes) -> None:
        self.behalf.append((name, BEHALF.get()))
        await super().create(name, data)

    async def write(self, name: str, chunks: Chunks) -> int:
        self.behalf.append((name, BEHALF.get()))
        return await super().write(name, chunks)


async def test_what_a_run_writes_for_all_is_not_done_on_behalf_of_who_called_first() -> None:
    objects = _Recording()
    async with (
        serving(objects, LOCAL) as server,
        connected(server.port) as first,
        connected(server.port) as other,
    ):
        run, _ = await create_run(first)
        learner = RawLearner(other, run, "us", random.Random(1))
        await learner.attach()
        for _ in range(3):
            base = await pull(other, run, "body")
            await learner.push(learner.header(base, "body"), np.ones(layout("body").numel, np.float32))
            await learner.event("version_committed")
        learner.detach()
    entries = {behalf for name, behalf in objects.behalf if name.startswith(f"runs/demo/{run.uid}/log/")}
    assert entries == {run.uid}
    updates = {behalf for name, behalf in objects.behalf if name.startswith(f"runs/demo/{run.uid}/updates/")}
    assert updates == {"us"}
