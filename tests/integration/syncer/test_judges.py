"""Judges report what versions are worth, and a gate takes a bad one back, once, whoever serves the run."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
import pytest

from skerry.v1 import runs_pb2 as runs
from skerry.v1 import types_pb2 as types
from skerry_syncer.server import SyncerServer, serving
from skerry_syncer.store.log.entries import RollbackItem
from tests.integration.syncer.conftest import LOCAL
from tests.integration.syncer.test_metrics import scraped
from tests.support.hooked_objects import HookedObjects
from tests.support.raw_learner import (
    LONG,
    Stubs,
    attached,
    connected,
    create_run,
    events_until,
    observed,
    quick,
    refused,
)

STORING = ("before write", "snapshots/head/")
GATED = quick(lease_term=LONG, gate=types.Gate(judge="eval", metric="loss", margin=0.1, rolls_back=True))


@pytest.fixture
def objects() -> HookedObjects:
    return HookedObjects()


async def position_of(stubs: Stubs) -> int:
    return (await stubs.runs.GetRun(runs.GetRunRequest(name="demo"))).run.position


async def report(stubs: Stubs, loss: float, *, request_id: str, position: int = 0) -> types.MetricsReport:
    request = runs.ReportMetricsRequest(
        request_id=request_id,
        name="demo",
        position=position or await position_of(stubs),
        judge="eval",
        metrics={"loss": loss},
    )
    return (await stubs.runs.ReportMetrics(request)).report


async def roll_backs(server: SyncerServer) -> AsyncIterator[RollbackItem]:
    """Yields the roll-backs that the log has."""
    log = (await server.host.open("demo")).log
    await log.tail()
    async for entry, _ in log.entries():
        for item in entry.items:
            if isinstance(item, RollbackItem):
                yield item


async def test_reports_reach_observers_and_whoever_asks_later_and_a_repeated_one_counts_once(
    objects: HookedObjects,
) -> None:
    async with serving(objects, LOCAL) as server, connected(server.port) as stubs:
        run, _ = await create_run(stubs)
        call = await observed(stubs, run)
        first = await report(stubs, 3.25, request_id="1" * 32)
        assert await report(stubs, 3.25, request_id="1" * 32, position=run.position) == first
        assert first.HasField("run_step_count")
        event = (await events_until(call, "metrics_reported"))[-1].metrics_reported
        assert (event, dict(event.metrics), event.judge) == (first, {"loss": 3.25}, "eval")
        diverged = await report(stubs, math.inf, request_id="2" * 32)
        assert math.isnan(diverged.metrics["loss"])
        reports = (await stubs.runs.GetRun(runs.GetRunRequest(name="demo"))).reports
        assert [each.position for each in reports] == [first.position, diverged.position]


@pytest.mark.parametrize(
    ("reason", "code", "changes"),
    [
        ("BAD_REQUEST", grpc.StatusCode.INVALID_ARGUMENT, {"metrics": {}}),
        ("BAD_REQUEST", grpc.StatusCode.INVALID_ARGUMENT, {"metrics": {f"m{number}": 1.0 for number in range(17)}}),
        ("BAD_NAME", grpc.StatusCode.INVALID_ARGUMENT, {"metrics": {"Loss %": 1.0}}),
        ("BAD_NAME", grpc.StatusCode.INVALID_ARGUMENT, {"judge": ""}),
        ("BAD_NAME", grpc.StatusCode.INVALID_ARGUMENT, {"request_id": "1"}),
        ("VERSION_NOT_FOUND", grpc.StatusCode.NOT_FOUND, {"position": 10**6}),
        ("VERSION_NOT_FOUND", grpc.StatusCode.NOT_FOUND, {"position": 0}),
        ("RUN_NOT_FOUND", grpc.StatusCode.NOT_FOUND, {"name": "other"}),
    ],
)
async def test_a_wrong_report_is_refused(
    stubs: Stubs, run: types.Run, reason: str, code: grpc.StatusCode, changes: dict[str, Any]
) -> None:
    fields: dict[str, Any] = {
        "request_id": "1" * 32,
        "name": "demo",
        "position": run.position,
        "judge": "eval",
        "metrics": {"loss": 1},
    }
    with refused(reason, code):
        await stubs.runs.ReportMetrics(runs.ReportMetricsRequest(**(fields | changes)))


async def test_a_bad_version_is_rolled_back_once_by_two_replicas(objects: HookedObjects) -> None:
    async with (
        serving(objects, LOCAL) as first,
        serving(objects, LOCAL) as second,
        connected(first.port) as stubs,
        connected(second.port) as others,
    ):
        run, _ = await create_run(stubs, policy=GATED)
        call = await observed(others, run)
        learner = await attached(stubs, run)
        good = await report(stubs, 3.0, request_id="1" * 32)
        await learner.advance()
        bad = await report(stubs, 4.0, request_id="2" * 32)
        assert (good.better_position, bad.better_position) == (0, good.position)
        await events_until(call, "rolled_back")
        assert (await report(others, 5.0, request_id="3" * 32, position=bad.position)).is_abandoned
        await learner.advance()
        assert (await report(stubs, 2.9, request_id="4" * 32)).better_position == 0
        for server in (first, second):
            (item,) = [item async for item in roll_backs(server)]
            assert (item.target_position, item.author) == (good.position, "gate: judge=eval, metric=loss")


async def test_a_replica_that_starts_carries_out_what_a_killed_one_began(objects: HookedObjects) -> None:
    async with serving(objects, LOCAL) as server, connected(server.port) as stubs:
        run, _ = await create_run(stubs, policy=GATED)
        good = await report(stubs, 3.0, request_id="1" * 32)
        await (await attached(stubs, run)).advance()
        began = asyncio.Event()

        async def stops() -> None:
            began.set()
            await asyncio.Event().wait()

        objects.hooks[STORING] = stops
        await report(stubs, math.nan, request_id="2" * 32)
        await asyncio.wait_for(began.wait(), 10)
    objects.hooks.clear()
    async with serving(objects, LOCAL) as server, connected(server.port) as stubs:
        await events_until(await observed(stubs, run), "rolled_back")
        (item,) = [item async for item in roll_backs(server)]
        assert item.target_position == good.position


async def test_a_gate_that_only_alerts_leaves_the_run_as_it_is(objects: HookedObjects) -> None:
    policy = quick(lease_term=LONG, gate=types.Gate(judge="eval", metric="loss", margin=0.1))
    async with (
        serving(objects, replace(LOCAL, metrics="127.0.0.1:0")) as server,
        connected(server.port) as stubs,
    ):
        run, _ = await create_run(stubs, policy=policy)
        assert (await scraped(server.metrics_url))['skerry_gate_failures_total{run="demo"}'] == 0
        first = await report(stubs, 3.0, request_id="1" * 32)
        await (await attached(stubs, run)).advance()
        assert (await report(stubs, 4.0, request_id="2" * 32)).better_position == first.position
        assert (await scraped(server.metrics_url))['skerry_gate_failures_total{run="demo"}'] == 1
        assert [item async for item in roll_backs(server)] == []
