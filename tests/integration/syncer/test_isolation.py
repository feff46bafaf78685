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
from skerry.v1 import runs_pb2 as runs
from skerry_syncer.server import serving
from skerry_syncer.store.log.entries import FORMAT
from skerry_syncer.store.objects.opening import open_objects
from tests.integration.syncer.conftest import LOCAL
from tests.support.heard_logs import heard_logs
from tests.support.hooked_objects import HookedObjects
from tests.support.raw_learner import Stubs, attached, connected, create_run, delta_values, pull, refused

IMPATIENT = dataclasses.replace(LOCAL, host=dataclasses.replace(LOCAL.host, opening_s=0.1))


async def listed(stubs: Stubs) -> list[str]:
    return [run.name for run in (await stubs.runs.ListRuns(runs.ListRunsRequest())).runs]


async def test_a_run_that_is_still_opening_says_so_and_keeps_nobody_else_waiting() -> None:
    objects = HookedObjects()
    async with serving(objects, LOCAL) as server, connected(server.port) as stubs:
        large, _ = await create_run(stubs, "large")
        await create_run(stubs, "small")
    objects.hooks["before get", f"runs/large/{large.uid}/log/"] = (go := asyncio.Event()).wait
    async with serving(objects, IMPATIENT) as server, connected(server.port) as stubs:
        for _ in range(2):
            with refused("RUN_OPENING", grpc.StatusCode.UNAVAILABLE):
                await stubs.runs.GetRun(runs.GetRunRequest(name="large"))
        assert (await stubs.runs.GetRun(runs.GetRunRequest(name="small"))).run.name == "small"
        assert await listed(stubs) == ["small"]
        health = await health_pb2_grpc.HealthStub(stubs.channel).Check(health_pb2.HealthCheckRequest())
        assert health.status == health_pb2.HealthCheckResponse.SERVING
        with RunsClient(f"127.0.0.1:{server.port}") as client:
            waiting = asyncio.create_task(asyncio.to_thread(client.get_run, "large"))
            await asyncio.sleep(0.5)
            go.set()
            assert (await waiting).run.uid == large.uid, "a client waits until the run is open"


async def test_a_server_ends_while_a_run_is_still_opening() -> None:
    objects = HookedObjects()
    async with serving(objects, LOCAL) as server, connected(server.port) as stubs:
        await create_run(stubs)
    objects.hooks["before get", "/log/"] = asyncio.Event().wait
    async with asyncio.timeout(10), serving(objects, IMPATIENT) as server, connected(server.port) as stubs:
        with refused("RUN_OPENING", grpc.StatusCode.UNAVAILABLE):
            await stubs.runs.GetRun(runs.GetRunRequest(name="demo"))


async def test_a_defect_that_one_run_meets_keeps_no_other_from_being_opened() -> None:
    objects = HookedObjects()
    async with serving(objects, LOCAL) as server, connected(server.port) as stubs:
        run, _ = await create_run(stubs, "a-broken")
        await create_run(stubs, "sound")

    async def fail() -> None:
        raise KeyError("a defect")

    objects.hooks["before get", f"/{run.uid}/"] = fail
    with heard_logs() as lines:
        async with asyncio.timeout(10), serving(objects, LOCAL):
            while not any((line["event"], line.get("run")) == ("run opened", "sound") for line in lines):
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("broken", ["log", "names"])
async def test_neither_a_run_that_can_not_be_read_nor_a_stray_folder_hides_a_run(store_url: str, broken: str) -> None:
    async with serving(open_objects(store_url), LOCAL) as server, connected(server.port) as stubs:
        run, _ = await create_run(stubs, "a-broken")
        await create_run(stubs, "sound")
    folder = Path(urlsplit(store_url).path) / "runs"
    (folder / "lost+found" / "names").mkdir(parents=True)
    names = folder / run.name / "names" / f"{1:020}"
    entry = folder / run.name / run.uid / "log" / f"{2:020}" if broken == "log" else names
    entry.write_bytes(b"")
    async with serving(open_objects(store_url), LOCAL) as server, connected(server.port) as stubs:
        assert await listed(stubs) == ["sound"]
        with refused("STORE_ROLLED_BACK", grpc.StatusCode.DATA_LOSS):
            await stubs.runs.GetRun(runs.GetRunRequest(name=run.name))


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
        await asyncio.to_thread(root.rename, away)
        if is_mount_point:
            await asyncio.to_thread(root.mkdir)
        with refused("STORE_UNAVAILABLE", grpc.StatusCode.UNAVAILABLE) as caught:
            await learner.push(header, delta_values())
        assert caught[0].retry_after_s is not None
        await asyncio.sleep(2 * LOCAL.host.name_lifetime_s)
        for name in ("demo", "other"):
            with refused("STORE_UNAVAILABLE", grpc.StatusCode.UNAVAILABLE):
                await stubs.runs.GetRun(runs.GetRunRequest(name=name))
        if is_mount_point:
            await asyncio.to_thread(root.rmdir)  # fails if anything was written into it
        await asyncio.to_thread(away.rename, root)
        await learner.push(header, delta_values())
        await learner.event("version_committed")


@pytest.mark.parametrize(
    ("entry", "reason", "code"),
    [
        (b"no entry", "STORE_ROLLED_BACK", grpc.StatusCode.DATA_LOSS),
        (b'{"format":%d}' % (FORMAT + 1), "NEWER_FORMAT", grpc.StatusCode.UNAVAILABLE),  # is read elsewhere
    ],
)
async def test_a_run_whose_log_can_not_be_followed_says_so_and_is_served_again_once_it_can(
    store_url: str, entry: bytes, reason: str, code: grpc.StatusCode
) -> None:
    async with serving(open_objects(store_url), LOCAL) as server, connected(server.port) as stubs:
        run, _ = await create_run(stubs)
        await create_run(stubs, "other")
        learner = await attached(stubs, run)
        log = Path(urlsplit(store_url).path) / "runs" / run.name / run.uid / "log"
        harm = log / f"{max(int(path.name) for path in log.iterdir()) + 1:020}"
        whole = log.with_name("entry")  # the replica looks at the folder all the time
        whole.write_bytes(entry)
        whole.rename(harm)
        with refused(reason, code):
            await learner.event("version_committed")
        for _ in range(2):
            with refused(reason, code):
                await learner.attach()
        assert await listed(stubs) == ["other"]
        harm.unlink()
        again = await attached(stubs, run)
        await again.advance()
