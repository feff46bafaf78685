"""A snapshot that the store takes long to write holds up no merge, and is of the version that it names."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest

from skerry.v1 import runs_pb2 as runs
from skerry_syncer.server import serving
from tests.integration.syncer.conftest import LOCAL
from tests.support.raw_learner import RawLearner, Stubs, connected, create_run, layout, pull, snapshot_policy
from tests.support.stuck_objects import StuckObjects


async def _version(stubs: Stubs, learner: RawLearner, seed: int) -> int:
    """Pushes a delta, and returns the version that it made."""
    base = await pull(stubs, learner.run, "body")
    values = (0.1 * np.random.default_rng(seed).standard_normal(layout("body").numel)).astype(np.float32)
    await learner.push(learner.header(base, "body"), values)
    return (await learner.event("version_committed", timeout_s=5)).version_committed.version.version


@pytest.mark.parametrize("stuck", ["weights", "momentum", "residual"])
async def test_merges_go_on_while_a_snapshot_is_written(stuck: str) -> None:
    objects = StuckObjects()
    async with serving(objects, LOCAL) as server, connected(server.port) as stubs:
        run, _ = await create_run(stubs, policy=snapshot_policy(1e-9))
        learner = RawLearner(stubs, run, "eu", random.Random(1))
        await learner.attach()
        objects.stuck = f"snapshots/body/1-{stuck}"
        assert [await _version(stubs, learner, seed) for seed in range(3)] == [1, 2, 3]
        assert len(objects.hung) == 1
        objects.go.set()
        listing = runs.ListVersionsRequest(name="demo", fragment="body")
        async with asyncio.timeout(5):
            while not (await stubs.runs.ListVersions(listing)).versions[2].has_snapshot:
                await asyncio.sleep(0.02)
        snapshot = await pull(stubs, run, "body", target=1)  # compares the tree digest with the log's
        assert snapshot.plan.objects[0].version == 1
        # The outer state is right too: a replica that begins from it replays to the digests that the log names.
    async with serving(objects, LOCAL) as server, connected(server.port) as stubs:
        learner = RawLearner(stubs, run, "us", random.Random(2))
        await learner.attach()
        assert await _version(stubs, learner, 9) == 4
