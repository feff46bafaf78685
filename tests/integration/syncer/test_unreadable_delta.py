"""A round whose stored delta can't be read is closed again without it; the log names the delta."""

from __future__ import annotations

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
    Stubs,
    attached,
    connected,
    create_run,
    delta_values,
    events_until,
    observed,
    pull,
    quick,
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


@pytest.fixture
def lossy(store_url: str) -> Lossy:
    return Lossy(store_url)


CLOSE = runs.CloseRunRequest(name="demo")


@pytest.mark.parametrize("is_together", [False, True])
async def test_an_unreadable_delta_is_quarantined_and_the_others_are_merged(lossy: Lossy, is_together: bool) -> None:
    """Alone in its round it makes the round void, and the next one goes on."""
    policy = quick(quarantine_ratio=0.0, quorum_count=2 if is_together else 1)
    async with lossy.served() as stubs:
        run, _ = await create_run(stubs, policy=policy)
        eu, us = await attached(stubs, run, "eu"), await attached(stubs, run, "us")
        base = await pull(stubs, run, "body")
        lost, sound = eu.header(base, "body"), us.header(base, "body")
        lossy.lost.add(lost.delta_id)
        await eu.push(lost, delta_values(1))
        if not is_together:
            (fate,) = (await eu.event("fates_decided")).fates_decided.fates
            assert (fate.delta_id, fate.fate) == (lost.delta_id, types.FATE_QUARANTINED)
            assert "can't be read" in fate.reason
        await us.push(sound, delta_values(2))
        committed = (await us.event("version_committed")).version_committed
        assert [delta.delta_id for delta in committed.merged] == [sound.delta_id]
        assert committed.version.version == 1
        await stubs.runs.CloseRun(CLOSE)
    state = await final_state(lossy.store_url, run.name, run.uid)
    fates = check_fates(state, {lost.delta_id, sound.delta_id})
    assert (fates[Fate.QUARANTINED], fates[Fate.MERGED]) == (1, 1 + len(run.fragments))


async def test_a_cold_replica_goes_on_without_a_delta_of_the_past_by_a_roll_back(lossy: Lossy) -> None:
    async with lossy.served() as stubs:
        run, _ = await create_run(stubs, policy=quick(quarantine_ratio=0.0))
        learner = await attached(stubs, run)
        await learner.advance()
        lost = learner.pushed[0].delta_id
    lossy.lost.add(lost)
    async with lossy.served() as stubs:
        learner = await attached(stubs, run, "us")
        base = await pull(stubs, run, "body")
        observer = await observed(stubs, run)
        await learner.push(learner.header(base, "body"), delta_values(2))
        await events_until(observer, "round_closed")
        position = (await stubs.runs.GetRun(runs.GetRunRequest(name="demo"))).run.position
        request = runs.RollBackRequest(name="demo", request_id="b" * 32, target_position=position)
        await stubs.runs.RollBack(request)
        await learner.event("rolled_back")
        again = await pull(stubs, run, "body")
        assert (base.version, again.version) == (1, 2)
        assert again.values.tobytes() == base.values.tobytes(), "the weights are known by the updates"
        committed = (await learner.advance()).version_committed
        assert [delta.delta_id for delta in committed.merged] == [learner.pushed[-1].delta_id]
        assert committed.version.version == 3
        await stubs.runs.CloseRun(CLOSE)
    state = await final_state(lossy.store_url, run.name, run.uid)
    fates = check_fates(state, {lost, *(header.delta_id for header in learner.pushed)})
    assert fates[Fate.EXPIRED] == 1, "what waited for the lost state expired by name"
