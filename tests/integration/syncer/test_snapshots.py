"""A snapshot that the store takes long to write holds up no merge, and is of the version that it names."""

from __future__ import annotations

import asyncio

import pytest

from skerry.v1 import runs_pb2 as runs
from skerry_syncer.server import serving
from tests.integration.syncer.conftest import LOCAL
from tests.support.hooked_objects import HookedObjects
from tests.support.raw_learner import attached, connected, create_run, pull, quick


@pytest.mark.parametrize("stuck", ["weights", "momentum", "residual"])
async def test_merges_go_on_while_a_snapshot_is_written(stuck: str) -> None:
    objects, storing, go = HookedObjects(), ("before write", f"snapshots/body/1-{stuck}"), asyncio.Event()
    async with serving(objects, LOCAL) as server, connected(server.port) as stubs:
        run, _ = await create_run(stubs, policy=quick(snapshot_ratio=1e-9))
        learner = await attached(stubs, run)
        objects.hooks[storing] = go.wait
        versions = [(await learner.advance(seed)).version_committed.version.version for seed in range(3)]
        assert versions == [1, 2, 3]
        assert objects.calls[storing] == 1
        go.set()
        listing = runs.ListVersionsRequest(name="demo", fragment="body")
        async with asyncio.timeout(5):
            while not (await stubs.runs.ListVersions(listing)).versions[2].has_snapshot:
                await asyncio.sleep(0.02)
        snapshot = await pull(stubs, run, "body", target=1)  # compares the tree digest with the log's
        assert snapshot.plan.objects[0].version == 1
        # The outer state is right too: a replica that begins from it replays to the digests that the log names.
    async with serving(objects, LOCAL) as server, connected(server.port) as stubs:
        event = await (await attached(stubs, run, "us")).advance()
        assert event.version_committed.version.version == 4
