"""A round whose stored delta can't be read is closed again without it; the log names the delta."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

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
    Stubs,
    attached,
    connected,
    create_run,
    delta_values,
    events_until,
    observed,
    pull,
)


class Lossy:
    """A store that loses the parts of some deltas after it stored them, and syncers that serve it."""

    def __init__(self, store_url: str) -> None:
        self.store_url = store_url
        self.lost: set[str] = set()

    def _schedule(self, operation: str, name: str) -> Fault:
        is_lost = operation in {"get", "stream"} and any(delta in name for delta in self.lost)
        return Fault(Effect.ERROR_BEFORE, ObjectMissingError) if is_lost else NO_FAULT

    @contextlib.asynccontextmanager
    async def served(self) -> AsyncIterator[Stubs]:
        """Serves the store from a process without memory."""
        objects = FaultyObjects(open_objects(self.store_url), self._schedule, clock=SystemClock(), late=LateWrites())
        async with serving(objects, LOCAL) as server, connected(server.port) as stubs:
            yield stubs

    async def counts(self, run: types.Run, *deltas: str) -> dict[Fate, int]:
        """Returns how many deltas had each fate, once it is checked that these were accepted and have one each."""
        return check_fates(await final_state(self.store_url, run.name, run.uid), set(deltas))


@pytest.fixture
def lossy(store_url: str) -> Lossy:
    return Lossy(store_url)


def policy(quorum_count: int = 1) -> types.Policy:
    """Returns a policy by which no delta waits to be compared with another's."""
    made = types.Policy()
    made.CopyFrom(QUICK)
    made.quarantine_ratio, made.quorum_count = 0.0, quorum_count
    return made


async def keep_the_weights(stubs: Stubs) -> None:
    """Rolls the run back to the weights that it has."""
    run = (await stubs.runs.GetRun(runs.GetRunRequest(name="demo"))).run
    await stubs.runs.RollBack(runs.RollBackRequest(name="demo", request_id="b" * 32, target_position=run.position))


async def close(stubs: Stubs) -> None:
    await stubs.runs.CloseRun(runs.CloseRunRequest(name="demo"))


async def test_a_round_of_one_unreadable_delta_is_void_and_the_next_one_goes_on(lossy: Lossy) -> None:
    async with lossy.served() as stubs:
        run, _ = await create_run(stubs, policy=policy())
        eu, us = await attached(stubs, run, "eu"), await attached(stubs, run, "us")
        base = await pull(stubs, run, "body")
        lost, sound = eu.header(base, "body"), us.header(base, "body")
        lossy.lost.add(lost.delta_id)
        await eu.push(lost, delta_values(1))
        (fate,) = (await eu.event("fates_decided")).fates_decided.fates
        assert (fate.delta_id, fate.fate) == (lost.delta_id, types.FATE_QUARANTINED)
        assert "can't be read" in fate.reason
        await us.push(sound, delta_values(2))
        committed = (await eu.event("version_committed")).version_committed
        assert [delta.delta_id for delta in committed.merged] == [sound.delta_id]
        assert committed.version.version == 1
        await close(stubs)
    assert (await lossy.counts(run, lost.delta_id, sound.delta_id))[Fate.QUARANTINED] == 1


async def test_the_others_of_a_set_are_merged_without_the_unreadable_delta(lossy: Lossy) -> None:
    async with lossy.served() as stubs:
        run, _ = await create_run(stubs, policy=policy(quorum_count=2))
        eu, us = await attached(stubs, run, "eu"), await attached(stubs, run, "us")
        observer = await observed(stubs, run)
        base = await pull(stubs, run, "body")
        lost, sound = eu.header(base, "body"), us.header(base, "body")
        lossy.lost.add(lost.delta_id)
        await eu.push(lost, delta_values(1))
        await us.push(sound, delta_values(2))
        closes = [(await events_until(observer, "round_closed"))[-1].round_closed for _ in range(2)]
        assert [(closed.attempt, set(closed.delta_ids)) for closed in closes] == [
            (0, {lost.delta_id, sound.delta_id}),
            (1, {sound.delta_id}),
        ]
        committed = (await eu.event("version_committed")).version_committed
        assert [delta.delta_id for delta in committed.merged] == [sound.delta_id]
        await close(stubs)
    counts = await lossy.counts(run, lost.delta_id, sound.delta_id)
    assert (counts[Fate.QUARANTINED], counts[Fate.MERGED]) == (1, 1 + len(run.fragments))


@pytest.mark.parametrize("is_closing", [False, True])
async def test_a_cold_replica_goes_on_without_a_delta_of_the_past_by_a_roll_back(
    lossy: Lossy, is_closing: bool
) -> None:
    async with lossy.served() as stubs:
        run, _ = await create_run(stubs, policy=policy())
        learner = await attached(stubs, run)
        await learner.advance()
        lost = learner.pushed[0].delta_id
    lossy.lost.add(lost)
    async with lossy.served() as stubs, asyncio.TaskGroup() as tasks:
        learner = await attached(stubs, run, "us")
        base = await pull(stubs, run, "body")
        observer = await observed(stubs, run)
        await learner.push(learner.header(base, "body"), delta_values(2))
        if is_closing:
            tasks.create_task(close(stubs))
        await events_until(observer, "round_closed")
        await keep_the_weights(stubs)
        await learner.event("rolled_back")
        if not is_closing:
            again = await pull(stubs, run, "body")
            assert (base.version, again.version) == (1, 2)
            assert again.values.tobytes() == base.values.tobytes(), "the weights are known by the updates"
            committed = (await learner.advance()).version_committed
            assert [delta.delta_id for delta in committed.merged] == [learner.pushed[-1].delta_id]
            assert committed.version.version == 3
            await close(stubs)
    counts = await lossy.counts(run, lost, *(header.delta_id for header in learner.pushed))
    assert counts[Fate.EXPIRED] == 1, "what waited for the lost state expired by name"
