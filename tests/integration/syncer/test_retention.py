"""A syncer collects by itself what a run's policy does not keep, and what is pinned can be rolled back to."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import grpc
import numpy as np

from skerry.v1 import runs_pb2 as runs
from skerry.v1 import types_pb2 as types
from skerry_syncer.server import serving
from skerry_syncer.settings import ReplicaSettings
from skerry_syncer.store.objects.opening import open_objects
from tests.integration.syncer.conftest import LOCAL
from tests.support.raw_learner import Stubs, attached, connected, create_run, pull, quick, refused

_LITTLE = quick(kept_version_count=1, kept_hours=0, kept_day_count=0, snapshot_ratio=0.3)
_OFTEN = ReplicaSettings(collection_look_s=0.05, checkpoint_every=16)


async def _pin(stubs: Stubs, position: int) -> list[int]:
    """Pins a position, or takes the pin of its negative away; returns those that are pinned."""
    policy = types.Policy(pinned_positions=[position])
    request = runs.SetPolicyRequest(request_id=f"{abs(position):016x}{position < 0:016x}", name="demo", policy=policy)
    return list((await stubs.runs.SetPolicy(request)).run.policy.pinned_positions)


async def test_what_is_not_kept_goes_by_itself_and_a_pin_stays(store_url: str) -> None:
    settings = replace(LOCAL, host=replace(LOCAL.host, replica=_OFTEN))
    objects = open_objects(store_url)
    async with serving(objects, settings) as server, connected(server.port) as stubs:
        run, _ = await create_run(stubs, policy=_LITTLE)
        learner = await attached(stubs, run)
        events = [await learner.advance(seed) for seed in range(4)]
        wanted = await pull(stubs, run, "body")
        position = events[-1].position
        assert await _pin(stubs, position) == [position]
        for seed in range(12):
            await learner.advance(seed)

        folder = f"runs/demo/{run.uid}/deltas/body"
        while len([info async for info in objects.list(folder)]) > 10:  # of 16 and the initial weights
            await asyncio.sleep(0.02)
        with refused("VERSION_NOT_FOUND", grpc.StatusCode.NOT_FOUND):
            await _pin(stubs, events[0].position)
        request = runs.RollBackRequest(request_id="c" * 32, name="demo", target_position=position)
        rolled = (await stubs.runs.RollBack(request)).run
        assert [(version.fragment, version.version) for version in rolled.versions] == [("body", 17), ("head", 1)]
        assert np.array_equal((await pull(stubs, run, "body")).values, wanted.values)
        assert await _pin(stubs, -position) == []
