"""A fault of one learner, one run or one stray folder does not affect the others."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from urllib.parse import urlsplit

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from skerry import RunsClient
from skerry.v1 import exchange_pb2 as exchange
from skerry.v1 import runs_pb2 as runs
from skerry.v1 import types_pb2 as types
from skerry_syncer.server import serving
from skerry_syncer.store.objects.opening import open_objects
from tests.integration.syncer.conftest import LOCAL
from tests.support.raw_learner import Stubs, attached, connected, create_run, delta_values, pull, refused
from tests.support.stuck_objects import StuckObjects

INVALID = grpc.StatusCode.INVALID_ARGUMENT
IMPATIENT = dataclasses.replace(LOCAL, host=dataclasses.replace(LOCAL.host, opening_s=0.1))


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
        assert [run.name for run in (await stubs.runs.ListRuns(runs.ListRunsRequest())).runs] == ["small"]
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


async def test_a_report_that_makes_no_sense_is_refused(stubs: Stubs) -> None:
    run, _ = await create_run(stubs)
    learner = await attached(stubs, run)
    assert learner.call is not None
    await learner.call.write(exchange.AttachRequest(report=types.LearnerReport(step_count=-1)))
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


async def test_pages_of_runs_fit_a_message(stubs: Stubs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skerry_syncer.rpc.runs._PAGE_BYTES", 1)
    names = ["a", "b", "c"]
    for name in names:
        await create_run(stubs, name)
    pages, token = list[list[str]](), ""
    while not pages or token:
        page = await stubs.runs.ListRuns(runs.ListRunsRequest(page_token=token))
        pages.append([run.name for run in page.runs])
        token = page.next_page_token
    assert pages == [[name] for name in names]


def hide(root: Path, away: Path, *, is_mount_point: bool) -> None:
    root.rename(away)
    if is_mount_point:
        root.mkdir()


def show(root: Path, away: Path) -> None:
    if root.exists():
        root.rmdir()  # fails if anything was written into it
    away.rename(root)


@pytest.mark.parametrize("is_mount_point", [False, True])
async def test_a_store_that_is_away_for_a_while_is_unavailable_and_no_run_is_lost(
    store_url: str, is_mount_point: bool
) -> None:
    """Where a volume is not mounted there is an empty folder, in which nothing may be begun."""
    root = Path(urlsplit(store_url).path)
    away = root.with_name("away")
    async with serving(open_objects(store_url), LOCAL) as server, connected(server.port) as stubs:
        run, _ = await create_run(stubs)
        learner = await attached(stubs, run)
        header = learner.header(await pull(stubs, run, "body"), "body")
        await asyncio.to_thread(hide, root, away, is_mount_point=is_mount_point)
        with refused("STORE_UNAVAILABLE", grpc.StatusCode.UNAVAILABLE):
            await learner.push(header, delta_values())
        await asyncio.sleep(0.3)
        for name in ("demo", "other"):
            with refused("STORE_UNAVAILABLE", grpc.StatusCode.UNAVAILABLE):
                await stubs.runs.GetRun(runs.GetRunRequest(name=name))
        await asyncio.to_thread(show, root, away)
        await learner.push(header, delta_values())
        await learner.event("version_committed")


async def test_a_run_that_was_damaged_and_repaired_is_served_again(store_url: str) -> None:
    async with serving(open_objects(store_url), LOCAL) as server, connected(server.port) as stubs:
        run, _ = await create_run(stubs)
        learner = await attached(stubs, run)
        log = Path(urlsplit(store_url).path) / "runs" / run.name / run.uid / "log"
        harm = log / f"{max(int(entry.name) for entry in log.iterdir()) + 1:020}"
        harm.write_bytes(b"no entry")
        with refused("STORE_ROLLED_BACK", grpc.StatusCode.DATA_LOSS):
            await learner.event("version_committed")
        for _ in range(2):
            with refused("STORE_ROLLED_BACK", grpc.StatusCode.DATA_LOSS):
                await stubs.runs.GetRun(runs.GetRunRequest(name=run.name, run_uid=run.uid))
        harm.unlink()
        again = await attached(stubs, run)
        await again.advance()
