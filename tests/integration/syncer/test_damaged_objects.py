"""A syncer whose store has lost or damaged objects goes around them, says which they are, and never stops for good."""

from __future__ import annotations

import asyncio
from pathlib import Path
from urllib.parse import urlsplit

import grpc
import numpy as np
import pytest

from skerry import ArrayLearner
from skerry.v1 import runs_pb2 as runs
from skerry.v1 import types_pb2 as types
from skerry_syncer.server import SyncerServer, serving
from skerry_syncer.store.errors import ObjectMissingError
from skerry_syncer.store.log.entries import Fate
from skerry_syncer.store.objects.opening import open_objects
from tests.integration.syncer.conftest import LOCAL
from tests.support.audit import check_fates, final_state
from tests.support.heard_logs import heard_logs
from tests.support.hooked_objects import HookedObjects
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
    refused,
)


async def _has_snapshot(stubs: Stubs) -> bool:
    """Whether the newest version has a snapshot."""
    answer = await stubs.runs.ListVersions(runs.ListVersionsRequest(name="demo", fragment="body"))
    return answer.versions[0].has_snapshot


def _folder(store_url: str, run: types.Run) -> Path:
    return Path(urlsplit(store_url).path) / "runs" / run.name / run.uid / "snapshots" / "body"


def _flip(path: Path) -> None:
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


@pytest.mark.parametrize("is_lost", [False, True])
async def test_a_damaged_snapshot_is_gone_around_by_pulls_and_by_a_learner_that_joins(
    store_url: str, server: SyncerServer, stubs: Stubs, is_lost: bool
) -> None:
    run, _ = await create_run(stubs, policy=quick(snapshot_ratio=1e-9))
    learner = await attached(stubs, run)
    for seed in range(2):
        await learner.advance(seed)
        while not await _has_snapshot(stubs):  # a merge meanwhile would have none
            await asyncio.sleep(0.02)
    (weights,) = _folder(store_url, run).glob("2-weights-*")
    if is_lost:
        weights.unlink()
    else:
        _flip(weights)

    def join() -> dict[str, int]:
        arrays = {tensor.name: np.zeros(tensor.shape, np.float32) for tensor in run.tensors}
        with ArrayLearner(arrays, target=f"127.0.0.1:{server.port}", run="demo", learner_id="us") as joining:
            return dict(joining.stats.versions)

    assert (await asyncio.to_thread(join))["body"] == 2
    assert (await pull(stubs, run, "body")).version == 2


async def test_a_version_to_which_nothing_leads_is_said_to_be_unreadable_until_it_is_repaired(
    store_url: str, stubs: Stubs
) -> None:
    run, _ = await create_run(stubs)
    (weights,) = _folder(store_url, run).glob("0-weights-*")
    data = weights.read_bytes()
    weights.unlink()
    for _ in range(2):
        with refused("PLAN_EXPIRED", grpc.StatusCode.FAILED_PRECONDITION):
            await pull(stubs, run, "body")
        with refused("OBJECT_UNREADABLE", grpc.StatusCode.UNAVAILABLE) as caught:
            await pull(stubs, run, "body")
        assert caught[0].metadata["object"] == f"snapshots/body/{weights.name}"
    weights.write_bytes(data)
    assert (await pull(stubs, run, "body")).version == 0


async def test_a_replica_that_can_not_rebuild_a_version_keeps_its_streams_and_tries_again(store_url: str) -> None:
    async with serving(open_objects(store_url), LOCAL) as server, connected(server.port) as stubs:
        run, _ = await create_run(stubs, policy=quick(snapshot_ratio=1e6))
        await (await attached(stubs, run)).advance()
        base = await pull(stubs, run, "body")
    kept = {path: path.read_bytes() for path in _folder(store_url, run).iterdir()}
    for path in kept:
        _flip(path)
    async with serving(open_objects(store_url), LOCAL) as server, connected(server.port) as stubs:
        learner = await attached(stubs, run, "us")
        with heard_logs() as lines:
            await learner.push(learner.header(base, "body"), delta_values())
            async with asyncio.timeout(20):
                while not any(line["event"] == "merge failed" for line in lines):
                    await asyncio.sleep(0.02)
        view = await stubs.runs.GetRun(runs.GetRunRequest(name="demo"))
        assert (view.run.status, view.run.versions[0].version) == (types.RUN_STATUS_OPEN, 1)
        for path, data in kept.items():
            path.write_bytes(data)
        committed = (await learner.event("version_committed")).version_committed
        assert committed.version.version == 2


def lose(objects: HookedObjects, delta: str) -> None:
    """Has a store lose the parts of a delta after it stored them, until its hooks are cleared."""

    async def miss() -> None:
        raise ObjectMissingError(f"object is lost. delta={delta}")

    objects.hooks["before stream", delta] = objects.hooks["before get", delta] = miss


CLOSE = runs.CloseRunRequest(name="demo")


@pytest.mark.parametrize("is_together", [False, True])
async def test_an_unreadable_delta_is_quarantined_and_the_others_are_merged(is_together: bool) -> None:
    """Alone in its round it makes the round void, and the next one goes on."""
    objects, policy = HookedObjects(), quick(quarantine_ratio=0.0, quorum_count=2 if is_together else 1)
    async with serving(objects, LOCAL) as server, connected(server.port) as stubs:
        run, _ = await create_run(stubs, policy=policy)
        eu, us = await attached(stubs, run, "eu"), await attached(stubs, run, "us")
        base = await pull(stubs, run, "body")
        lost, sound = eu.header(base, "body"), us.header(base, "body")
        lose(objects, lost.delta_id)
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
    objects.hooks.clear()
    state = await final_state(objects, run.name, run.uid)
    fates = check_fates(state, {lost.delta_id, sound.delta_id})
    assert (fates[Fate.QUARANTINED], fates[Fate.MERGED]) == (1, 1 + len(run.fragments))


async def test_a_cold_replica_goes_on_without_a_delta_of_the_past_by_a_roll_back() -> None:
    objects = HookedObjects()
    async with serving(objects, LOCAL) as server, connected(server.port) as stubs:
        run, _ = await create_run(stubs, policy=quick(quarantine_ratio=0.0))
        learner = await attached(stubs, run)
        await learner.advance()
        lost = learner.pushed[0].delta_id
    lose(objects, lost)
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
    objects.hooks.clear()
    state = await final_state(objects, run.name, run.uid)
    fates = check_fates(state, {lost, *(header.delta_id for header in learner.pushed)})
    assert fates[Fate.EXPIRED] == 1, "what waited for the lost state expired by name"
