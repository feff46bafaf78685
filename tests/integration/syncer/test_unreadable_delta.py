"""A round whose stored delta can't be read is closed again without it; the log names the delta."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator

import numpy as np
import pytest

from skerry.runtime.clock import SystemClock
from skerry.v1 import runs_pb2 as runs
from skerry.v1 import types_pb2 as types
from skerry_syncer.server import serving
from skerry_syncer.store.errors import ObjectMissingError
from skerry_syncer.store.log.entries import Fate
from skerry_syncer.store.objects.opening import open_objects
from tests.integration.syncer.conftest import LOCAL
from tests.support.audit import check_fates, final_state
from tests.support.faulty_objects import NO_FAULT, Effect, Fault, FaultyObjects, LateWrites
from tests.support.raw_learner import (
    QUICK,
    RawLearner,
    Stubs,
    connected,
    create_run,
    events_until,
    layout,
    observed,
    pull,
)


def _alone() -> types.Policy:
    """A policy by which a first delta does not wait for another learner's, to be compared with."""
    policy = types.Policy()
    policy.CopyFrom(QUICK)
    policy.quarantine_ratio = 0.0
    return policy


class Loss:
    """A store that loses the parts of some deltas after it stored them."""

    def __init__(self) -> None:
        self.deltas: set[str] = set()

    def __call__(self, operation: str, name: str) -> Fault:
        is_lost = operation in {"get", "stream"} and any(delta in name for delta in self.deltas)
        return Fault(Effect.ERROR_BEFORE, ObjectMissingError) if is_lost else NO_FAULT


@pytest.fixture
def loss() -> Loss:
    return Loss()


@pytest.fixture
async def lossy_stubs(store_url: str, loss: Loss) -> AsyncIterator[Stubs]:
    objects = FaultyObjects(open_objects(store_url), loss, clock=SystemClock(), late=LateWrites())
    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(serving(objects, LOCAL))
        yield await stack.enter_async_context(connected(server.port))


def _values(seed: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return np.random.default_rng(seed).standard_normal(layout("body").numel).astype(np.float32)


async def test_a_round_of_one_unreadable_delta_is_void_and_the_next_one_goes_on(
    store_url: str, loss: Loss, lossy_stubs: Stubs
) -> None:
    run, _ = await create_run(lossy_stubs, policy=_alone())
    learners = [RawLearner(lossy_stubs, run, name, random.Random(name)) for name in ("eu", "us")]
    for learner in learners:
        await learner.attach()
    base = await pull(lossy_stubs, run, "body")
    lost = learners[0].header(base, "body")
    loss.deltas.add(lost.delta_id)
    await learners[0].push(lost, _values(1))
    (fate,) = (await learners[0].event("fates_decided")).fates_decided.fates
    assert (fate.delta_id, fate.fate) == (lost.delta_id, types.FATE_QUARANTINED)
    assert "can't be read" in fate.reason
    sound = learners[1].header(base, "body")
    await learners[1].push(sound, _values(2))
    committed = (await learners[0].event("version_committed")).version_committed
    assert [one.delta_id for one in committed.merged] == [sound.delta_id]
    assert committed.version.version == 1
    await lossy_stubs.runs.CloseRun(runs.CloseRunRequest(name="demo"))
    counts = check_fates(await final_state(store_url, "demo", run.uid), {lost.delta_id, sound.delta_id})
    assert counts[Fate.QUARANTINED] == 1


async def test_the_others_of_a_set_are_merged_without_the_unreadable_delta(
    store_url: str, loss: Loss, lossy_stubs: Stubs
) -> None:
    both = types.Policy()
    both.CopyFrom(QUICK)
    both.quorum_count = 2
    run, _ = await create_run(lossy_stubs, policy=both)
    learners = [RawLearner(lossy_stubs, run, name, random.Random(name)) for name in ("eu", "us")]
    for learner in learners:
        await learner.attach()
    observer = await observed(lossy_stubs, run)
    base = await pull(lossy_stubs, run, "body")
    headers = [learner.header(base, "body") for learner in learners]
    loss.deltas.add(headers[0].delta_id)
    for at, (learner, header) in enumerate(zip(learners, headers, strict=True)):
        await learner.push(header, _values(at))
    closes = [(await events_until(observer, "round_closed"))[-1].round_closed for _ in range(2)]
    assert [(one.attempt, set(one.delta_ids)) for one in closes] == [
        (0, {header.delta_id for header in headers}),
        (1, {headers[1].delta_id}),
    ]
    committed = (await learners[0].event("version_committed")).version_committed
    assert [one.delta_id for one in committed.merged] == [headers[1].delta_id]
    await lossy_stubs.runs.CloseRun(runs.CloseRunRequest(name="demo"))
    counts = check_fates(await final_state(store_url, "demo", run.uid), {one.delta_id for one in headers})
    assert (counts[Fate.QUARANTINED], counts[Fate.MERGED]) == (1, 1 + len(run.fragments))


@contextlib.asynccontextmanager
async def _served(store_url: str, loss: Loss) -> AsyncIterator[Stubs]:
    """Serves the store from a process without memory."""
    objects = FaultyObjects(open_objects(store_url), loss, clock=SystemClock(), late=LateWrites())
    async with serving(objects, LOCAL) as server, connected(server.port) as stubs:
        yield stubs


async def _keep_the_weights(stubs: Stubs) -> None:
    """Rolls the run back to the weights that it has."""
    run = (await stubs.runs.GetRun(runs.GetRunRequest(name="demo"))).run
    await stubs.runs.RollBack(runs.RollBackRequest(name="demo", request_id="b" * 32, target_position=run.position))


async def _close(stubs: Stubs) -> None:
    await stubs.runs.CloseRun(runs.CloseRunRequest(name="demo"))


async def test_a_cold_replica_goes_on_without_a_delta_of_the_past_by_a_roll_back(store_url: str, loss: Loss) -> None:
    lost = waiting = ""
    async with _served(store_url, loss) as stubs:
        run, _ = await create_run(stubs, policy=_alone())
        learner = RawLearner(stubs, run, "eu", random.Random("eu"))
        await learner.attach()
        header = learner.header(await pull(stubs, run, "body"), "body")
        lost = header.delta_id
        await learner.push(header, _values(1))
        await learner.event("version_committed")
    loss.deltas.add(lost)
    async with _served(store_url, loss) as stubs:
        learner = RawLearner(stubs, run, "us", random.Random("us"))
        await learner.attach()
        base = await pull(stubs, run, "body")
        header = learner.header(base, "body")
        waiting = header.delta_id
        observer = await observed(stubs, run)
        await learner.push(header, _values(2))
        await events_until(observer, "round_closed")
        await _keep_the_weights(stubs)
        await learner.event("rolled_back")
        again = await pull(stubs, run, "body")
        assert (base.version, again.version) == (1, 2)
        assert again.values.tobytes() == base.values.tobytes(), "the weights are known by the updates"
        header = learner.header(again, "body")
        await learner.push(header, _values(3))
        committed = (await learner.event("version_committed")).version_committed
        assert [one.delta_id for one in committed.merged] == [header.delta_id]
        assert committed.version.version == 3
        await stubs.runs.CloseRun(runs.CloseRunRequest(name="demo"))
    counts = check_fates(await final_state(store_url, "demo", run.uid), {lost, waiting, header.delta_id})
    assert counts[Fate.EXPIRED] == 1, "what waited for the lost state expired by name"


async def test_a_closing_run_whose_state_is_lost_ends_by_a_roll_back(store_url: str, loss: Loss) -> None:
    slow = types.Policy()
    slow.CopyFrom(QUICK)
    slow.quorum_count = 2  # one delta waits until the run is closed
    async with _served(store_url, loss) as stubs:
        run, _ = await create_run(stubs, policy=slow)
        learners = [RawLearner(stubs, run, name, random.Random(name)) for name in ("eu", "us")]
        base = await pull(stubs, run, "body")
        headers = []
        for at, learner in enumerate(learners):
            await learner.attach()
            headers.append(learner.header(base, "body"))
            await learner.push(headers[-1], _values(at))
        await learners[0].event("version_committed")
    loss.deltas.add(headers[0].delta_id)
    async with _served(store_url, loss) as stubs:
        learner = RawLearner(stubs, run, "asia", random.Random("asia"))
        await learner.attach()
        header = learner.header(await pull(stubs, run, "body"), "body")
        await learner.push(header, _values(9))
        observer = await observed(stubs, run)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_close(stubs))
            await events_until(observer, "round_closed")
            await _keep_the_weights(stubs)
    deltas = {one.delta_id for one in (*headers, header)}
    counts = check_fates(await final_state(store_url, "demo", run.uid), deltas)
    assert counts[Fate.EXPIRED] == 1
