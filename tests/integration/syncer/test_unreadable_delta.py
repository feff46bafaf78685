"""A round whose stored delta can't be read is closed again without it; the log names the delta."""

from __future__ import annotations

import pytest

from skerry.v1 import runs_pb2 as runs
from skerry.v1 import types_pb2 as types
from skerry_syncer.server import serving
from skerry_syncer.store.errors import ObjectMissingError
from skerry_syncer.store.log.entries import Fate
from tests.integration.syncer.conftest import LOCAL
from tests.support.audit import check_fates, final_state
from tests.support.dict_objects import DictObjects
from tests.support.raw_learner import (
    attached,
    connected,
    create_run,
    delta_values,
    events_until,
    observed,
    pull,
    quick,
)


class LossyObjects(DictObjects):
    """A store that loses the parts of some deltas after it stored them."""

    def __init__(self) -> None:
        super().__init__()
        self.lost: set[str] = set()

    def _data(self, name: str) -> bytes:
        if any(delta in name for delta in self.lost):
            raise ObjectMissingError(f"object is lost. name={name}")
        return super()._data(name)


CLOSE = runs.CloseRunRequest(name="demo")


@pytest.mark.parametrize("is_together", [False, True])
async def test_an_unreadable_delta_is_quarantined_and_the_others_are_merged(is_together: bool) -> None:
    """Alone in its round it makes the round void, and the next one goes on."""
    objects, policy = LossyObjects(), quick(quarantine_ratio=0.0, quorum_count=2 if is_together else 1)
    async with serving(objects, LOCAL) as server, connected(server.port) as stubs:
        run, _ = await create_run(stubs, policy=policy)
        eu, us = await attached(stubs, run, "eu"), await attached(stubs, run, "us")
        base = await pull(stubs, run, "body")
        lost, sound = eu.header(base, "body"), us.header(base, "body")
        objects.lost.add(lost.delta_id)
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
    objects.lost.clear()
    state = await final_state(objects, run.name, run.uid)
    fates = check_fates(state, {lost.delta_id, sound.delta_id})
    assert (fates[Fate.QUARANTINED], fates[Fate.MERGED]) == (1, 1 + len(run.fragments))


async def test_a_cold_replica_goes_on_without_a_delta_of_the_past_by_a_roll_back() -> None:
    objects = LossyObjects()
    async with serving(objects, LOCAL) as server, connected(server.port) as stubs:
        run, _ = await create_run(stubs, policy=quick(quarantine_ratio=0.0))
        learner = await attached(stubs, run)
        await learner.advance()
        lost = learner.pushed[0].delta_id
    objects.lost.add(lost)
    async with serving(objects, LOCAL) as server, connected(server.port) as stubs:
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
    objects.lost.clear()
    state = await final_state(objects, run.name, run.uid)
    fates = check_fates(state, {lost, *(header.delta_id for header in learner.pushed)})
    assert fates[Fate.EXPIRED] == 1, "what waited for the lost state expired by name"
