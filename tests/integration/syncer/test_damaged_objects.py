"""A syncer whose store has lost or damaged blobs goes around them, says which they are, and never stops for good."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from urllib.parse import urlsplit

import grpc
import numpy as np
import pytest

from skerry.errors import is_transient
from skerry.exchange.boundary import Boundary
from skerry.exchange.loop import ExchangeLoop
from skerry.exchange.session import Calls
from skerry.exchange.settings import ExchangeSettings
from skerry.model.interface import ArrayParameters
from skerry.net.grpc_transport import GrpcTransport
from skerry.net.retry import Retry, RetrySettings
from skerry.runtime.clock import SystemClock
from skerry.runtime.identifiers import SystemEntropy
from skerry.runtime.workers import InlineWorkers
from skerry.v1 import runs_pb2 as runs
from skerry.v1 import types_pb2 as types
from skerry_syncer.server import SyncerServer, serving
from skerry_syncer.store.objects.opening import open_objects
from tests.integration.syncer.conftest import LOCAL
from tests.support.raw_learner import (
    Stubs,
    attached,
    connected,
    create_run,
    delta_values,
    pull,
    refused,
    snapshot_policy,
)


async def _trained(stubs: Stubs, run: types.Run, count: int, *, is_snapshot_of_each: bool = False) -> None:
    learner = await attached(stubs, run)
    for seed in range(count):
        await learner.advance(seed)
        while is_snapshot_of_each and not await _newest_has_snapshot(stubs):  # a merge meanwhile would have none
            await asyncio.sleep(0.02)


async def _newest_has_snapshot(stubs: Stubs) -> bool:
    answer = await stubs.runs.ListVersions(runs.ListVersionsRequest(name="demo", fragment="body"))
    return answer.versions[0].has_snapshot


def _folder(store_url: str, run: types.Run, kind: str) -> Path:
    return Path(urlsplit(store_url).path) / "runs" / run.name / run.uid / kind / "body"


def _harm(path: Path, how: str) -> bytes:
    """Harms an object and returns what it was."""
    data = path.read_bytes()
    path.unlink()
    if how == "flipped":
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    elif how == "short":
        path.write_bytes(data[:-8])
    return data


@pytest.mark.parametrize("how", ["flipped", "short", "lost"])
async def test_a_pull_goes_around_a_damaged_snapshot(store_url: str, stubs: Stubs, how: str) -> None:
    run, _ = await create_run(stubs, policy=snapshot_policy(1e-9))
    await _trained(stubs, run, 2, is_snapshot_of_each=True)
    (weights,) = _folder(store_url, run, "snapshots").glob("2-weights-*")
    _harm(weights, how)
    with refused("PLAN_EXPIRED", grpc.StatusCode.FAILED_PRECONDITION):
        await pull(stubs, run, "body")
    assert (await pull(stubs, run, "body")).version == 2


async def test_a_version_to_which_nothing_leads_is_said_to_be_unreadable_until_it_is_repaired(
    store_url: str, stubs: Stubs
) -> None:
    run, _ = await create_run(stubs)
    (weights,) = _folder(store_url, run, "snapshots").glob("0-weights-*")
    data = _harm(weights, "lost")
    for _ in range(2):
        with refused("PLAN_EXPIRED", grpc.StatusCode.FAILED_PRECONDITION):
            await pull(stubs, run, "body")
        refusal = refused("OBJECT_UNREADABLE", grpc.StatusCode.UNAVAILABLE)
        with refusal:
            await pull(stubs, run, "body")
        assert refusal.refusal.metadata["object"] == f"snapshots/body/{weights.name}"
    weights.write_bytes(data)
    assert (await pull(stubs, run, "body")).version == 0


async def test_a_replica_that_can_not_rebuild_a_version_keeps_its_streams_and_tries_again(store_url: str) -> None:
    async with serving(open_objects(store_url), LOCAL) as server, connected(server.port) as stubs:
        run, _ = await create_run(stubs, policy=snapshot_policy(1e6))
        await _trained(stubs, run, 2)
        base = await pull(stubs, run, "body")
    files = [path for path in sorted(_folder(store_url, run, "snapshots").rglob("*")) if path.is_file()]
    kept = {path: _harm(path, "flipped") for path in files}
    async with serving(open_objects(store_url), LOCAL) as server, connected(server.port) as stubs:
        learner = await attached(stubs, run, "us")
        await learner.push(learner.header(base, "body"), delta_values())
        await asyncio.sleep(1)  # its merge fails meanwhile
        view = await stubs.runs.GetRun(runs.GetRunRequest(name="demo"))
        assert (view.run.status, view.run.versions[0].version) == (types.RUN_STATUS_OPEN, 2)
        for path, data in kept.items():
            path.write_bytes(data)
        committed = (await learner.event("version_committed")).version_committed
        assert committed.version.version == 3


@pytest.mark.parametrize("lane_bytes", [Calls.lane_bytes, 40])
@pytest.mark.parametrize("how", ["flipped", "short", "lost"])
async def test_a_learner_joins_by_way_of_an_older_snapshot(
    store_url: str, server: SyncerServer, stubs: Stubs, how: str, lane_bytes: int
) -> None:
    run, _ = await create_run(stubs, policy=snapshot_policy(1e-9))
    await _trained(stubs, run, 2, is_snapshot_of_each=True)
    (weights,) = _folder(store_url, run, "snapshots").glob("2-weights-*")
    _harm(weights, how)
    transport = GrpcTransport(f"127.0.0.1:{server.port}")
    exchange = ExchangeLoop(
        Calls(transport, Retry(RetrySettings(), random.Random(0), is_transient), lane_bytes=lane_bytes),
        ArrayParameters({one.name: np.zeros(one.shape, np.float32) for one in run.tensors}),
        ExchangeSettings(run=run.name, learner_id="us"),
        workers=InlineWorkers(),
        entropy=SystemEntropy(),
        boundary=Boundary(SystemClock(), asyncio.get_running_loop().call_soon_threadsafe),
    )
    try:
        await exchange.join()
    finally:
        await transport.close()
    assert exchange.stats.versions["body"] == 2
