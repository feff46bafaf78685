"""A fault of one learner, one run or one stray folder does not affect the others."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from pathlib import Path
from urllib.parse import urlsplit

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from skerry import RunsClient
from skerry.v1 import exchange_pb2 as exchange
from skerry.v1 import runs_pb2 as runs
from skerry.v1 import types_pb2 as types
from skerry.wire.digests import delta_digest
from skerry.wire.layout import FragmentLayout, TensorSpec
from skerry_syncer.server import serving
from skerry_syncer.store.objects.opening import open_objects
from tests.integration.syncer.conftest import LOCAL
from tests.support.raw_learner import (
    FLOAT32,
    LAYOUTS,
    QUICK,
    RawLearner,
    Stubs,
    connected,
    create_run,
    hex_id,
    layout,
    part_messages,
    plan_messages,
    pull,
    push_messages,
    refused,
    send,
)
from tests.support.stuck_objects import StuckObjects

INVALID = grpc.StatusCode.INVALID_ARGUMENT
IMPATIENT = dataclasses.replace(LOCAL, host=dataclasses.replace(LOCAL.host, opening_s=0.1))


def _values(seed: int, *, fragment: str = "body") -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return np.random.default_rng(seed).standard_normal(layout(fragment).numel).astype(np.float32)


async def test_a_run_that_is_still_opening_says_so_and_keeps_nobody_else_waiting() -> None:
    objects = StuckObjects()
    async with serving(objects, LOCAL) as server, connected(server.port) as stubs:
        large, _ = await create_run(stubs, "large")
        await create_run(stubs, "small")
    objects.unread = f"runs/large/{large.uid}/log/"
    async with serving(objects, IMPATIENT) as server, connected(server.port) as stubs:
        for _ in range(2):
            with refused("RUN_OPENING", grpc.StatusCode.UNAVAILABLE):
                await stubs.runs.GetRun(runs.GetRunRequest(name="large"))
        assert (await stubs.runs.GetRun(runs.GetRunRequest(name="small"))).run.name == "small"
        assert [one.name for one in (await stubs.runs.ListRuns(runs.ListRunsRequest())).runs] == ["small"]
        health = await health_pb2_grpc.HealthStub(stubs.channel).Check(health_pb2.HealthCheckRequest())
        assert health.status == health_pb2.HealthCheckResponse.SERVING
        with RunsClient(f"127.0.0.1:{server.port}") as client:
            waiting = asyncio.create_task(asyncio.to_thread(client.get_run, "large"))
            await asyncio.sleep(0.5)
            objects.go.set()
            assert (await waiting).run.uid == large.uid, "a client waits until the run is open"


async def test_a_server_ends_while_a_run_is_still_opening() -> None:
    objects = StuckObjects()
    async with serving(objects, LOCAL) as server, connected(server.port) as stubs:
        await create_run(stubs)
    objects.unread = "/log/"
    async with asyncio.timeout(10), serving(objects, LOCAL) as server, connected(server.port) as stubs:
        opening = asyncio.ensure_future(stubs.runs.GetRun(runs.GetRunRequest(name="demo")))
        await asyncio.sleep(0.2)
    with pytest.raises((grpc.aio.AioRpcError, asyncio.CancelledError)):
        await opening


async def _say(learner: RawLearner, report: types.LearnerReport) -> None:
    assert learner.call is not None
    await learner.call.write(exchange.AttachRequest(report=report))


async def test_a_report_that_makes_no_sense_is_refused(stubs: Stubs) -> None:
    run, _ = await create_run(stubs)
    learner = RawLearner(stubs, run, "eu", random.Random(1))
    await learner.attach()
    await _say(learner, types.LearnerReport(step_count=-1))
    with refused("BAD_REQUEST", INVALID):
        await learner.event("delta_accepted")


async def test_a_folder_that_is_no_run_does_not_keep_the_syncer_from_serving(store_url: str) -> None:
    async with serving(open_objects(store_url), LOCAL) as server, connected(server.port) as stubs:
        await create_run(stubs)
    root = Path(urlsplit(store_url).path)
    for name in ("lost+found", "Thumbs", ".trash"):
        (root / "runs" / name / "names").mkdir(parents=True)
    async with serving(open_objects(store_url), LOCAL) as server, connected(server.port) as stubs:
        await asyncio.sleep(0.2)
        listed = await stubs.runs.ListRuns(runs.ListRunsRequest())
        assert [run.name for run in listed.runs] == ["demo"]


@pytest.mark.parametrize("broken", ["log", "names"])
async def test_a_run_that_can_not_be_read_hides_no_other(store_url: str, broken: str) -> None:
    async with serving(open_objects(store_url), LOCAL) as server, connected(server.port) as stubs:
        for name in ("a-broken", "sound"):
            run, _ = await create_run(stubs, name)
            if name == "a-broken":
                uid = run.uid
    folder = Path(urlsplit(store_url).path) / "runs" / "a-broken"
    entry = folder / uid / "log" / f"{2:020}" if broken == "log" else folder / "names" / f"{1:020}"
    entry.write_bytes(b"")
    async with serving(open_objects(store_url), LOCAL) as server, connected(server.port) as stubs:
        listed = await stubs.runs.ListRuns(runs.ListRunsRequest())
        assert [run.name for run in listed.runs] == ["sound"]
        with refused("STORE_ROLLED_BACK", grpc.StatusCode.DATA_LOSS):
            await stubs.runs.GetRun(runs.GetRunRequest(name="a-broken"))


async def test_initial_weights_come_once(stubs: Stubs) -> None:
    source = random.Random(3)
    request_id = hex_id(source)
    tensors, fragments = plan_messages()
    request = runs.CreateRunRequest(
        request_id=request_id, name="demo", tensors=tensors, fragments=fragments, policy=QUICK
    )
    draft = (await stubs.runs.CreateRun(request)).run

    def header(fragment: str) -> exchange.PushHeader:
        return exchange.PushHeader(
            run="demo",
            run_uid=draft.uid,
            learner_id="creator",
            session_id=request_id,
            delta_id=hex_id(source),
            fragment=fragment,
            base_version=-1,
        )

    first = header("body")
    await send(stubs, push_messages(first, _values(1), FLOAT32))
    async with asyncio.timeout(10):
        while not (await stubs.runs.GetRun(runs.GetRunRequest(name="demo", run_uid=draft.uid))).run.versions:
            await asyncio.sleep(0.02)
    with refused("BASE_REPEATED", grpc.StatusCode.ALREADY_EXISTS) as caught:
        await send(stubs, push_messages(header("body"), _values(2), FLOAT32))
    assert caught.refusal.metadata == {"delta_id": first.delta_id}
    await send(stubs, push_messages(header("head"), _values(2, fragment="head"), FLOAT32))
    committed = (await stubs.runs.CommitRun(runs.CommitRunRequest(name="demo", run_uid=draft.uid))).run
    closed = (await stubs.runs.CloseRun(runs.CloseRunRequest(name="demo"))).run
    assert [(one.fragment, one.version) for one in closed.versions] == [(one.name, 0) for one in LAYOUTS]
    assert list(closed.versions) == list(committed.versions)


async def test_a_plan_that_no_answer_could_hold_is_refused(stubs: Stubs) -> None:
    names = [f"tensor-{number}-{'x' * 480}" for number in range(3500)]
    request = runs.CreateRunRequest(
        request_id="1" * 32,
        name="demo",
        tensors=[types.Tensor(name=name, shape=[1]) for name in names],
        fragments=[types.Fragment(name="all", tensors=names)],
    )
    with refused("TOO_LARGE", grpc.StatusCode.RESOURCE_EXHAUSTED):
        await stubs.runs.CreateRun(request)


async def test_pages_of_runs_fit_a_message(stubs: Stubs) -> None:
    names = [f"tensor-{number}-{'x' * 400}" for number in range(1500)]
    tensors = [types.Tensor(name=name, shape=[1]) for name in names]
    for run in range(4):
        request = runs.CreateRunRequest(
            request_id=f"{run:032x}",
            name=f"run-{run}",
            tensors=tensors,
            fragments=[types.Fragment(name="all", tensors=names)],
        )
        draft = (await stubs.runs.CreateRun(request)).run
        fragment = FragmentLayout("all", tuple(TensorSpec(name, (1,)) for name in names))
        header = exchange.PushHeader(
            run=draft.name,
            run_uid=draft.uid,
            learner_id="creator",
            session_id=f"{run:032x}",
            delta_id="d" * 32,
            fragment="all",
            base_version=-1,
        )
        messages, digest = part_messages(np.ones(1500, np.float32), fragment, FLOAT32, 0, 1500)
        complete = exchange.PushComplete(digest=delta_digest([(0, 1500, digest)]))
        await stubs.exchange.PushDelta(
            iter(
                [
                    exchange.PushDeltaRequest(header=header),
                    *messages,
                    exchange.PushDeltaRequest(complete=complete),
                ]
            )
        )
        await stubs.runs.CommitRun(runs.CommitRunRequest(name=draft.name, run_uid=draft.uid))
    listed: list[str] = []
    token = ""
    while True:
        page = await stubs.runs.ListRuns(runs.ListRunsRequest(page_token=token))
        listed += [run.name for run in page.runs]
        token = page.next_page_token
        if not token:
            break
    assert listed == [f"run-{run}" for run in range(4)]


async def test_a_store_that_is_away_for_a_while_is_unavailable_and_no_run_is_lost(store_url: str) -> None:
    root = Path(urlsplit(store_url).path)
    away = root.with_name("away")
    async with serving(open_objects(store_url), LOCAL) as server, connected(server.port) as stubs:
        run, _ = await create_run(stubs)
        learner = RawLearner(stubs, run, "eu", random.Random(1))
        await learner.attach()
        header = learner.header(await pull(stubs, run, "body"), "body")
        await asyncio.to_thread(root.rename, away)
        with refused("STORE_UNAVAILABLE", grpc.StatusCode.UNAVAILABLE):
            await learner.push(header, _values(1))
        await asyncio.sleep(0.2)
        with refused("STORE_UNAVAILABLE", grpc.StatusCode.UNAVAILABLE):
            await stubs.runs.ListRuns(runs.ListRunsRequest())
        await asyncio.to_thread(away.rename, root)
        await learner.push(header, _values(1))
        await learner.event("version_committed")


def _unmount(root: Path, away: Path) -> None:
    root.rename(away)
    root.mkdir()


def _mount_again(root: Path, away: Path) -> None:
    root.rmdir()  # fails if anything was written into it
    away.rename(root)


async def test_a_store_whose_volume_is_not_mounted_is_unavailable_and_nothing_is_lost(store_url: str) -> None:
    """The mount point is an empty folder, in which nothing may be begun."""
    root = Path(urlsplit(store_url).path)
    away = root.with_name("away")
    async with serving(open_objects(store_url), LOCAL) as server, connected(server.port) as stubs:
        run, _ = await create_run(stubs)
        learner = RawLearner(stubs, run, "eu", random.Random(1))
        await learner.attach()
        base = await pull(stubs, run, "body")
        await asyncio.to_thread(_unmount, root, away)
        header = learner.header(base, "body")
        with refused("STORE_UNAVAILABLE", grpc.StatusCode.UNAVAILABLE):
            await learner.push(header, _values(1))
        await asyncio.sleep(0.3)
        for request in (runs.GetRunRequest(name="demo"), runs.GetRunRequest(name="other")):
            with refused("STORE_UNAVAILABLE", grpc.StatusCode.UNAVAILABLE):
                await stubs.runs.GetRun(request)
        await asyncio.to_thread(_mount_again, root, away)
        await learner.push(header, _values(1))
        await learner.event("version_committed")


async def test_a_run_that_was_damaged_and_repaired_is_served_again(store_url: str) -> None:
    async with serving(open_objects(store_url), LOCAL) as server, connected(server.port) as stubs:
        run, _ = await create_run(stubs)
        learner = RawLearner(stubs, run, "eu", random.Random(1))
        await learner.attach()
        log = Path(urlsplit(store_url).path) / "runs" / run.name / run.uid / "log"
        harm = log / f"{max(int(entry.name) for entry in log.iterdir()) + 1:020}"
        harm.write_bytes(b"no entry")
        with refused("STORE_ROLLED_BACK", grpc.StatusCode.DATA_LOSS):
            await learner.event("version_committed")
        for _ in range(2):
            with refused("STORE_ROLLED_BACK", grpc.StatusCode.DATA_LOSS):
                await stubs.runs.GetRun(runs.GetRunRequest(name=run.name, run_uid=run.uid))
        harm.unlink()
        again = RawLearner(stubs, run, "eu", random.Random(2))
        await again.attach()
        await again.push(again.header(await pull(stubs, run, "body"), "body"), _values(1))
        await again.event("version_committed")
