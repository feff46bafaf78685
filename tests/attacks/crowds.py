"""Attacks on a syncer that has to do with very many runs or learners."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from skerry.runtime.clock import SystemClock
from skerry.runtime.identifiers import SystemEntropy
from skerry.runtime.workers import InlineWorkers
from skerry.store.log.entries import SessionItem
from skerry.store.objects.opening import open_objects
from skerry.store.store import Store
from skerry.v1 import runs_pb2 as runs
from tests.attacks.target import ATTACKER, READER, Attack, Target
from tests.attacks.wire import told_by
from tests.syncer.raw_learner import RawLearner, create_run, hex_id

_LISTED_RUNS: Final = 500
_LEARNERS: Final = 100_000
_IDS_AN_ENTRY: Final = 2_000


async def _create_many(target: Target, _store_url: str) -> None:
    """Creates the runs that `run_lists` lists."""
    numbers = iter(range(_LISTED_RUNS))
    async with target.connected() as stubs, asyncio.TaskGroup() as tasks:

        async def create() -> None:
            for number in numbers:
                await create_run(stubs, f"run{number}", seed=number)

        for _ in range(8):
            tasks.create_task(create())


async def run_lists(target: Target, told: Counter[str]) -> None:
    """Lists 500 runs again and again."""
    async with target.connected(READER) as stubs:
        while True:
            told["runs"] += len((await stubs.runs.ListRuns(runs.ListRunsRequest(page_size=1000))).runs)


async def _attach_many(_target: Target, store_url: str) -> None:
    """Puts 100,000 learners into the log, which the rate of new ids would take a day to let in."""
    source = random.Random(5)
    store = Store(
        open_objects(store_url), clock=SystemClock(), entropy=SystemEntropy(), workers=InlineWorkers(), writer="crowd"
    )
    log = await store.open_log("demo", await store.resolve("demo"))
    for first in range(0, _LEARNERS, _IDS_AN_ENTRY):
        await log.append([SessionItem(f"id{first + at}", hex_id(source), "") for at in range(_IDS_AN_ENTRY)])
    await store.close()


async def many_learners(target: Target, told: Counter[str]) -> None:
    """Asks for the run, in which 100,000 learners are attached, joins it and leaves, again and again."""
    async with target.connected() as stubs:
        for number in range(1_000_000):
            run = (await stubs.runs.GetRun(runs.GetRunRequest(name="demo"))).run
            learner = RawLearner(stubs, run, ATTACKER, random.Random(number))
            joined = told.total()
            await told_by(learner.attach(), told)
            told["joined"] += told.total() == joined
            learner.detach()


# What is done before an attack begins, with the syncer's store.
PREPARATIONS: Final[Mapping[str, Callable[[Target, str], Awaitable[None]]]] = {
    "run-lists": _create_many,
    "many-learners": _attach_many,
}
CROWDS: Final[tuple[Attack, ...]] = (run_lists, many_learners)
