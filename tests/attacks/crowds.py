"""Attacks on a syncer that has to do with very many runs, learners or tensors."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

import numpy as np

from skerry.runtime.clock import SystemClock
from skerry.runtime.identifiers import SystemEntropy
from skerry.runtime.workers import InlineWorkers
from skerry.v1 import exchange_pb2 as exchange
from skerry.v1 import runs_pb2 as runs
from skerry.v1 import types_pb2 as types
from skerry.wire.digests import delta_digest
from skerry.wire.layout import FragmentLayout, TensorSpec
from skerry_syncer.store.log.entries import SessionItem
from skerry_syncer.store.objects.opening import open_objects
from skerry_syncer.store.store import Store
from tests.attacks.cheap import attach_some
from tests.attacks.own_runs import create_large, create_storing, create_wide
from tests.attacks.target import ATTACKER, READER, Attack, Target
from tests.attacks.wire import told_by
from tests.support.raw_learner import FLOAT32, RawLearner, Stubs, create_run, hex_id, part_messages

_LISTED_RUNS: Final = 500
_LEARNERS: Final = 100_000
_IDS_AN_ENTRY: Final = 2_000
_TENSORS: Final = 60_000


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


def _of_many_tensors(request_id: str) -> runs.CreateRunRequest:
    names = [f"t{number}" for number in range(_TENSORS)]
    return runs.CreateRunRequest(
        request_id=request_id,
        name="many",
        tensors=[types.Tensor(name=name, shape=[1], dtype="float32") for name in names],
        fragments=[types.Fragment(name="all", tensors=names)],
    )


async def many_tensors(target: Target, told: Counter[str]) -> None:
    """Creates one draft of 60,000 tensors after another."""
    async with target.connected() as stubs:
        for number in itertools.count():
            await told_by(stubs.runs.CreateRun(_of_many_tensors(hex_id(random.Random(number)))), told)
            told["drafts"] += 1


async def _commit_many_tensors(target: Target, _store_url: str) -> None:
    """Creates the run that `large_answers` asks for."""
    source = random.Random(6)
    request_id = hex_id(source)
    tensors = FragmentLayout("all", tuple(TensorSpec(f"t{number}", (1,)) for number in range(_TENSORS)))
    async with target.connected() as stubs:
        uid = (await stubs.runs.CreateRun(_of_many_tensors(request_id))).run.uid
        header = exchange.PushHeader(
            run="many",
            run_uid=uid,
            learner_id=ATTACKER,
            session_id=request_id,
            delta_id=hex_id(source),
            fragment="all",
            base_version=-1,
        )
        values = np.ones(_TENSORS, np.float32)
        messages, digest = part_messages(values, tensors, FLOAT32, 0, _TENSORS, cut=2**18)
        complete = exchange.PushComplete(digest=delta_digest([(0, _TENSORS, digest)]))
        whole = [exchange.PushDeltaRequest(header=header), *messages, exchange.PushDeltaRequest(complete=complete)]
        await stubs.exchange.PushDelta(iter(whole))
        await stubs.runs.CommitRun(runs.CommitRunRequest(name="many", run_uid=uid))


async def large_answers(target: Target, told: Counter[str]) -> None:
    """Asks for a run of 60,000 tensors by two methods, in 50 calls at once over two connections."""

    async def ask(stubs: Stubs) -> None:
        while True:
            await told_by(stubs.runs.GetRun(runs.GetRunRequest(name="many")), told)
            told["answers"] += 1
            watch: Any = stubs.exchange.Watch(exchange.WatchRequest(run="many"))
            await told_by(watch.read(), told)
            watch.cancel()
            told["answers"] += 1

    async with target.connected() as one, target.connected() as other:
        await asyncio.gather(*(ask(stubs) for stubs in (one, other) for _ in range(25)))


async def large_hellos(target: Target, told: Counter[str]) -> None:
    """Attaches to a run of 60,000 tensors, which it names, with one session in 32 streams at once, again and again."""
    tensors = _of_many_tensors("").tensors
    async with target.connected() as stubs:
        run = (await stubs.runs.GetRun(runs.GetRunRequest(name="many"))).run
        hello = exchange.Hello(
            run="many", run_uid=run.uid, learner_id=ATTACKER, session_id=hex_id(random.Random(7)), tensors=tensors
        )

        async def attach() -> None:
            while True:
                call: Any = stubs.exchange.Attach(iter([exchange.AttachRequest(hello=hello)]))
                await told_by(call.read(), told)
                call.cancel()
                told["answers"] += 1

        await asyncio.gather(*(attach() for _ in range(32)))


# What is done before an attack begins, with the syncer's store.
PREPARATIONS: Final[Mapping[str, Callable[[Target, str], Awaitable[None]]]] = {
    "run-lists": _create_many,
    "many-learners": _attach_many,
    "large-answers": _commit_many_tensors,
    "large-hellos": _commit_many_tensors,
    "new-watches": attach_some,
    "own-snapshots": create_storing,
    "own-merges": create_large,
    "own-norms": create_wide,
}
CROWDS: Final[tuple[Attack, ...]] = (run_lists, many_learners, many_tensors, large_answers, large_hellos)
