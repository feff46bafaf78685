"""A syncer collects by itself what a run's policy does not keep, and what is pinned can be rolled back to."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from pathlib import Path

import grpc
import numpy as np

from skerry.v1 import runs_pb2 as runs
from skerry.v1 import types_pb2 as types
from skerry_syncer.server import ServerSettings, serving
from skerry_syncer.settings import ReplicaSettings
from skerry_syncer.store.objects.opening import open_objects
from tests.integration.syncer.conftest import LOCAL
from tests.support.raw_learner import FLOAT32, QUICK, RawLearner, Stubs, connected, create_run, layout, pull, refused

_LITTLE = types.Policy(kept_version_count=1, kept_hours=0, kept_day_count=0, snapshot_ratio=0.3)
_LITTLE.MergeFrom(QUICK)
_OFTEN = ReplicaSettings(collection_look_s=0.05, checkpoint_every=16)


async def _set_policy(stubs: Stubs, request_id: str, policy: types.Policy) -> list[int]:
    request = runs.SetPolicyRequest(request_id=request_id * 32, name="demo", policy=policy)
    return list((await stubs.runs.SetPolicy(request)).run.policy.pinned_positions)


async def _trained(stubs: Stubs, learner: RawLearner, count: int) -> list[types.Event]:
    events = []
    for _ in range(count):
        base = await pull(stubs, learner.run, "body")
        values = 0.1 * np.random.default_rng(base.version).standard_normal(layout("body").numel)
        await learner.push(learner.header(base, "body"), values.astype(np.float32))
        events.append(await learner.event("version_committed"))
    return events


async def test_what_is_not_kept_goes_by_itself_and_a_pin_stays(store_url: str) -> None:
    settings = replace(LOCAL, host=replace(LOCAL.host, replica=_OFTEN))
    objects = open_objects(store_url)
    async with serving(objects, settings) as server, connected(server.port) as stubs:
        run, _ = await create_run(stubs, policy=_LITTLE)
        learner = RawLearner(stubs, run, "eu", random.Random("eu"))
        await learner.attach()
        events = await _trained(stubs, learner, 4)
        wanted = await pull(stubs, run, "body")
        at = events[-1].position
        assert await _set_policy(stubs, "a", types.Policy(pinned_positions=[at])) == [at]
        await _trained(stubs, learner, 12)

        async def names() -> set[str]:
            folder = f"runs/demo/{run.uid}/deltas/body"
            return {info.name async for info in objects.list(folder)}

        while len(await names()) > 10:  # of 16 and the initial weights
            await asyncio.sleep(0.02)
        with refused("VERSION_NOT_FOUND", grpc.StatusCode.NOT_FOUND):
            await _set_policy(stubs, "b", types.Policy(pinned_positions=[events[0].position]))
        request = runs.RollBackRequest(request_id="c" * 32, name="demo", target_position=at)
        rolled = (await stubs.runs.RollBack(request)).run
        assert [(one.fragment, one.version) for one in rolled.versions] == [("body", 17), ("head", 1)]
        assert np.array_equal((await pull(stubs, run, "body")).values, wanted.values)
        assert await _set_policy(stubs, "d", types.Policy(pinned_positions=[-at])) == []
        listed = await stubs.runs.ListVersions(runs.ListVersionsRequest(name="demo", fragment="body"))
        assert listed.versions[0].version.version == 17
        learner.detach()


def _limited(run_bytes: int, look_s: float = 0.05) -> ServerSettings:
    replica = replace(_OFTEN, run_bytes=run_bytes, collection_look_s=look_s)
    return replace(LOCAL, host=replace(LOCAL.host, replica=replica))


async def _trained_when_let(stubs: Stubs, learner: RawLearner) -> None:
    async with asyncio.timeout(20):
        while True:
            try:
                await _trained(stubs, learner, 1)
            except grpc.aio.AioRpcError:
                await asyncio.sleep(0.05)
            else:
                return


async def test_a_run_that_has_too_much_takes_no_deltas_until_its_policy_keeps_less(tmp_path: Path) -> None:
    snapshots = types.Policy(kept_version_count=1000, snapshot_ratio=0)
    snapshots.MergeFrom(QUICK)
    limit_bytes = 400_000
    store_url = (tmp_path / "store").as_uri()
    async with serving(open_objects(store_url), _limited(limit_bytes)) as server, connected(server.port) as stubs:
        run, _ = await create_run(stubs, policy=snapshots)
        learner = RawLearner(stubs, run, "eu", random.Random("eu"))
        await learner.attach()
        with refused("QUOTA_EXCEEDED", grpc.StatusCode.RESOURCE_EXHAUSTED) as caught:
            await _trained(stubs, learner, 100)  # whose snapshots have three times its weights each
        assert "--run-limit" in caught.refusal.message
        assert 20 < (await pull(stubs, run, "body")).version < 99
    objects = open_objects(store_url)
    async with serving(objects, _limited(limit_bytes, look_s=60.0)) as server, connected(server.port) as stubs:
        learner = RawLearner(stubs, run, "eu", random.Random("again"))
        await learner.attach()
        with refused("QUOTA_EXCEEDED", grpc.StatusCode.RESOURCE_EXHAUSTED):  # another syncer knows at once
            await _trained(stubs, learner, 1)
        await _set_policy(stubs, "a", _LITTLE)
    objects = open_objects(store_url)
    async with serving(objects, _limited(limit_bytes)) as server, connected(server.port) as stubs:
        learner = RawLearner(stubs, run, "eu", random.Random("a third time"))
        await learner.attach()
        await _trained_when_let(stubs, learner)


async def test_quarantined_deltas_do_not_fill_the_share_of_a_run(store_url: str) -> None:
    policy = types.Policy(quarantine_ratio=30)
    policy.MergeFrom(_LITTLE)
    async with serving(open_objects(store_url), _limited(60_000)) as server, connected(server.port) as stubs:
        run, _ = await create_run(stubs, policy=policy)
        learner = RawLearner(stubs, run, "eu", random.Random("eu"))
        await learner.attach()
        await _trained(stubs, learner, 2)
        base = await pull(stubs, run, "body")
        with refused("QUOTA_EXCEEDED", grpc.StatusCode.RESOURCE_EXHAUSTED):
            for power in range(1, 24):  # each an outlier beside the one before
                values = np.full(layout("body").numel, 40.0**power, np.float32)
                await learner.push(learner.header(base, "body"), values, FLOAT32)
                await learner.event("fates_decided")
        await _trained_when_let(stubs, learner)
