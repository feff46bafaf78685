"""Three replicas on one store: every call may be sent to any of them, and any of them may die."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import grpc
import numpy as np
import pytest

from skerry.v1 import exchange_pb2 as exchange
from skerry.v1 import runs_pb2 as runs
from skerry.v1 import types_pb2 as types
from skerry_syncer.server import serving
from skerry_syncer.store.log.entries import FORMAT, Entry, bytes_digest
from skerry_syncer.store.objects.opening import open_objects
from tests.integration.syncer.conftest import LOCAL
from tests.support.persistent_learner import PAUSE_S
from tests.support.raw_learner import (
    INT4,
    QUICK,
    Float32s,
    RawLearner,
    Stubs,
    connected,
    create_run,
    layout,
    part_messages,
    pull,
    push_messages,
    refused,
)


@pytest.fixture
async def replicas(store_url: str) -> AsyncIterator[list[Stubs]]:
    """Connections to three replicas."""
    async with contextlib.AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(serving(open_objects(store_url), LOCAL)) for _ in range(3)]
        yield [await stack.enter_async_context(connected(server.port)) for server in servers]


def _values(seed: int) -> Float32s:
    return np.random.default_rng(seed).standard_normal(layout("body").numel).astype(np.float32)


async def _learner(stubs: Stubs, run: types.Run, name: str) -> RawLearner:
    learner = RawLearner(stubs, run, name, random.Random(name))
    await learner.attach()
    return learner


async def test_a_version_made_by_one_replica_is_told_by_the_others(replicas: list[Stubs]) -> None:
    run, _ = await create_run(replicas[0])
    learners = [await _learner(stubs, run, f"on-{at}") for at, stubs in enumerate(replicas)]
    base = await pull(replicas[1], run, "body")
    header = learners[1].header(base, "body")
    await learners[1].push(header, _values(1))
    digests = set()
    for learner, stubs in zip(learners, replicas, strict=True):
        committed = (await learner.event("version_committed")).version_committed
        assert [one.delta_id for one in committed.merged] == [header.delta_id]
        digests.add(committed.version.digest)
        assert (await pull(stubs, run, "body", base=base)).version == 1
        assert (await stubs.exchange.QueryPush(_query(header))).fate.fate == types.FATE_MERGED
        learner.detach()
    assert len(digests) == 1


def _query(header: exchange.PushHeader) -> exchange.QueryPushRequest:
    return exchange.QueryPushRequest(
        run=header.run, run_uid=header.run_uid, fragment=header.fragment, delta_id=header.delta_id
    )


async def test_an_answer_reflects_what_the_caller_has_seen_elsewhere(replicas: list[Stubs]) -> None:
    run, _ = await create_run(replicas[0])
    for at in range(5):
        change = types.Policy(max_staleness=10 + at)
        changed = await replicas[at % 3].runs.SetPolicy(
            runs.SetPolicyRequest(request_id=f"{at:032x}", name="demo", seen_position=run.position, policy=change)
        )
        seen = await replicas[(at + 1) % 3].runs.GetRun(
            runs.GetRunRequest(name="demo", seen_position=changed.run.position)
        )
        assert seen.run.policy.max_staleness == 10 + at


async def test_a_session_is_fenced_on_every_replica(replicas: list[Stubs]) -> None:
    run, _ = await create_run(replicas[0])
    older = await _learner(replicas[0], run, "eu")
    newer = RawLearner(replicas[1], run, "eu", random.Random("newer"))
    await newer.attach()
    with pytest.raises(Exception, match="newer session"):
        await older.event("version_committed")
    newer.detach()


async def test_a_new_session_takes_over_however_old_its_checkpoint_and_a_fenced_one_never(
    replicas: list[Stubs],
) -> None:
    run, _ = await create_run(replicas[0])
    older = await _learner(replicas[0], run, "eu")
    newer = RawLearner(replicas[1], run, "eu", random.Random("newer"))
    newer.seen_position = 1  # a checkpoint from before the older session
    await newer.attach()
    assert newer.attached is not None
    older.seen_position = newer.attached.run.position
    with pytest.raises(Exception, match="newer session"):
        await older.attach()
    base = await pull(replicas[1], run, "body")
    await newer.push(newer.header(base, "body"), _values(1))
    newer.detach()


async def test_attach_ends_on_every_replica_when_the_run_is_closed(replicas: list[Stubs]) -> None:
    run, _ = await create_run(replicas[0])
    learners = [await _learner(stubs, run, f"on-{at}") for at, stubs in enumerate(replicas)]
    base = await pull(replicas[1], run, "body")
    header = learners[1].header(base, "body", steps=1)
    await learners[1].push(header, _values(1))
    await replicas[0].runs.CloseRun(runs.CloseRunRequest(name=run.name))
    for learner in learners:
        committed = (await learner.event("version_committed", timeout_s=10.0)).version_committed
        assert [one.delta_id for one in committed.merged] == [header.delta_id]
        assert (await learner.event("status_changed")).status_changed == types.RUN_STATUS_CLOSED
        with pytest.raises(Exception, match="run is closed"):
            await learner.event("version_committed", timeout_s=10.0)


async def test_parts_of_one_push_may_land_on_different_replicas(replicas: list[Stubs]) -> None:
    run, _ = await create_run(replicas[0])
    learner = await _learner(replicas[0], run, "eu")
    header = learner.header(await pull(replicas[0], run, "body"), "body")
    parts = ((0, 512), (512, 728))
    for stubs, part in zip(replicas, parts, strict=False):
        of_part, _ = part_messages(_values(2), layout("body"), INT4, *part)
        answer = await stubs.exchange.PushDelta(iter([exchange.PushDeltaRequest(header=header), *of_part]))
        assert answer.state == exchange.PUSH_STATE_PARTS_STORED
    complete = push_messages(header, _values(2), INT4, parts=parts)[-1]
    answer = await replicas[2].exchange.PushDelta(iter([exchange.PushDeltaRequest(header=header), complete]))
    assert answer.state == exchange.PUSH_STATE_ACCEPTED
    committed = (await learner.event("version_committed")).version_committed
    assert [one.delta_id for one in committed.merged] == [header.delta_id]
    learner.detach()


async def test_a_round_waits_for_a_learner_that_is_attached_elsewhere(replicas: list[Stubs]) -> None:
    patient = types.Policy()
    patient.CopyFrom(QUICK)
    patient.grace_factor = 0.99
    patient.delay_step_count = 1_000_000
    patient.lease_term.FromMilliseconds(1500)
    run, _ = await create_run(replicas[0], policy=patient)
    learners = [await _learner(stubs, run, f"on-{at}") for at, stubs in enumerate(replicas)]
    for learner in learners:
        learner.step = 2  # nobody waits for one that has not begun
    async with asyncio.TaskGroup() as tasks:
        reports = [tasks.create_task(_keep_reporting(learner)) for learner in learners]
        await _until_all_are_seen(replicas)
        base = await pull(replicas[0], run, "body")
        headers = [learner.header(base, "body") for learner in learners]
        for at, (learner, header) in enumerate(zip(learners, headers, strict=True)):
            await learner.push(header, _values(at))
        committed = (await learners[0].event("version_committed")).version_committed
        for task in reports:
            task.cancel()
    assert {one.delta_id for one in committed.merged} == {header.delta_id for header in headers}
    assert committed.participation == 1.0
    for learner in learners:
        learner.detach()


async def _keep_reporting(learner: RawLearner) -> None:
    while True:
        await learner.report(step_time_ms=60_000)
        await asyncio.sleep(PAUSE_S)


async def _until_all_are_seen(replicas: list[Stubs]) -> None:
    async with asyncio.timeout(20):
        for stubs in replicas:
            while True:
                learners = (await stubs.runs.GetRun(runs.GetRunRequest(name="demo"))).learners
                if sum(one.is_live for one in learners) == len(replicas):
                    break
                await asyncio.sleep(PAUSE_S)


async def test_changes_of_the_policy_by_two_replicas_are_all_kept(replicas: list[Stubs]) -> None:
    run, _ = await create_run(replicas[0])
    source = random.Random(0)

    async def change(stubs: Stubs, policy: types.Policy) -> int:
        request_id = f"{source.getrandbits(128):032x}"
        request = runs.SetPolicyRequest(name=run.name, run_uid=run.uid, request_id=request_id, policy=policy)
        return (await stubs.runs.SetPolicy(request)).run.position

    for value in range(20, 40):
        positions = await asyncio.gather(
            change(replicas[0], types.Policy(inner_step_count=value)),
            change(replicas[1], types.Policy(max_staleness=value)),
            change(replicas[1], types.Policy(quorum_count=value)),
            change(replicas[2], types.Policy(grace_factor=value / 64)),
        )
        request = runs.GetRunRequest(name=run.name, seen_position=max(positions))
        policy = (await replicas[0].runs.GetRun(request)).run.policy
        kept = (policy.inner_step_count, policy.max_staleness, policy.quorum_count, policy.grace_factor)
        assert kept == (value, value, value, value / 64)


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
        newer = Entry(position, run.uid, digest, "newer", "0" * 32, 0.0, (), FORMAT + 1)
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
