"""Format levels as callers see them: raising one, and a replica whose version is too old for a run."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
import pytest

from skerry.v1 import runs_pb2 as runs
from skerry_syncer.server import serving
from skerry_syncer.store.log.entries import ENTRY_FORMAT, OLDEST_LEVEL, Entry, bytes_digest
from skerry_syncer.store.objects.opening import open_objects
from tests.integration.syncer.conftest import LOCAL
from tests.support.raw_learner import RawLearner, Stubs, connected, create_run, plan_messages, refused


def _upgrade(level: int = 0) -> runs.UpgradeRunRequest:
    return runs.UpgradeRunRequest(name="demo", format_level=level)


async def test_a_new_run_has_the_newest_level(stubs: Stubs) -> None:
    run, _ = await create_run(stubs)
    assert run.format_level == ENTRY_FORMAT


async def test_a_run_created_at_the_level_of_the_version_before_is_raised_once(store_url: str) -> None:
    host = dataclasses.replace(LOCAL.host, new_run_level=OLDEST_LEVEL)
    settings = dataclasses.replace(LOCAL, host=host)
    async with serving(open_objects(store_url), settings) as server, connected(server.port) as stubs:
        run, _ = await create_run(stubs)
        assert run.format_level == OLDEST_LEVEL
        for level in (ENTRY_FORMAT, 0):
            raised = (await stubs.runs.UpgradeRun(_upgrade(level))).run
            assert raised.format_level == ENTRY_FORMAT
        assert raised.position == run.position + 1, "the second call wrote nothing"
        for level in (OLDEST_LEVEL, ENTRY_FORMAT + 1):
            with refused("BAD_REQUEST", grpc.StatusCode.INVALID_ARGUMENT):
                await stubs.runs.UpgradeRun(_upgrade(level))


async def test_a_replica_that_is_too_old_for_a_run_sends_its_learners_elsewhere(store_url: str) -> None:
    async with serving(open_objects(store_url), LOCAL) as server, connected(server.port) as stubs:
        run, _ = await create_run(stubs)
        other, _ = await create_run(stubs, "other")
        learner = RawLearner(stubs, run, "eu", random.Random(1))
        await learner.attach()
        folder = Path(urlsplit(store_url).path) / "runs" / "demo" / run.uid / "log"
        newest = max(folder.iterdir())
        position = int(newest.name) + 1
        digest = bytes_digest(newest.read_bytes())
        newer = Entry(position, run.uid, digest, "newer", "0" * 32, 0.0, (), ENTRY_FORMAT + 1)
        whole = folder.with_name("entry")  # the replica looks at the folder all the time
        whole.write_bytes(newer.to_bytes())
        whole.rename(folder / f"{position:020}")
        with refused("NEWER_FORMAT", grpc.StatusCode.UNAVAILABLE):
            await learner.event("version_committed")
        for _ in range(2):
            with refused("NEWER_FORMAT", grpc.StatusCode.UNAVAILABLE):
                await stubs.runs.GetRun(runs.GetRunRequest(name="demo"))
            with refused("NEWER_FORMAT", grpc.StatusCode.UNAVAILABLE):
                await learner.attach()
        listed = await stubs.runs.ListRuns(runs.ListRunsRequest())
        assert [one.name for one in listed.runs] == [other.name]


@pytest.mark.parametrize("level", [OLDEST_LEVEL - 1, ENTRY_FORMAT + 1])
async def test_a_level_is_one_that_this_version_writes(stubs: Stubs, level: int) -> None:
    await create_run(stubs)
    with refused("BAD_REQUEST", grpc.StatusCode.INVALID_ARGUMENT):
        await stubs.runs.UpgradeRun(_upgrade(level))


async def test_a_run_of_an_older_level_records_no_untrained_tensors(store_url: str) -> None:
    old = dataclasses.replace(LOCAL, host=dataclasses.replace(LOCAL.host, new_run_level=OLDEST_LEVEL))
    tensors, fragments = plan_messages()
    request = runs.CreateRunRequest(request_id="1" * 32, name="demo", tensors=tensors, fragments=fragments)
    request.untrained.add(name="base", shape=[2, 0], dtype="uint8", digest=bytes(32))
    async with serving(open_objects(store_url), old) as server, connected(server.port) as stubs:
        assert not (await stubs.runs.CreateRun(request)).run.untrained
    request.request_id = "2" * 32
    async with serving(open_objects(store_url), LOCAL) as server, connected(server.port) as stubs:
        run = (await stubs.runs.CreateRun(request)).run
        assert list(run.untrained) == list(request.untrained)
    log = Path(urlsplit(store_url).path) / "runs" / "demo" / run.uid / "log"
    for entry in log.iterdir():
        entry.unlink()  # as if the replica had died after it had written run.json
    async with serving(open_objects(store_url), old) as server, connected(server.port) as stubs:
        again = (await stubs.runs.CreateRun(request)).run
    assert list(again.untrained) == list(request.untrained)
    assert again.format_level == ENTRY_FORMAT  # so that no older version reads it


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": ""},
        {"name": "x" * 513},
        {"name": "base", "shape": [-1]},
        {"name": "base", "digest": b"short"},
        {"name": "body.0"},
    ],
)
async def test_malformed_untrained_tensors_are_refused(stubs: Stubs, wrong: dict[str, Any]) -> None:
    tensors, fragments = plan_messages()
    tensors[0].name = fragments[0].tensors[0] = "body.0"
    request = runs.CreateRunRequest(request_id="1" * 32, name="demo", tensors=tensors, fragments=fragments)
    request.untrained.add(**wrong)
    with refused("SHAPE_MISMATCH", grpc.StatusCode.INVALID_ARGUMENT):
        await stubs.runs.CreateRun(request)
