"""Three replicas on one store: every call may be sent to any of them, and any of them may die."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator

import grpc
import pytest

from skerry.v1 import exchange_pb2 as exchange
from skerry.v1 import runs_pb2 as runs
from skerry.v1 import types_pb2 as types
from skerry_syncer.server import serving
from skerry_syncer.store.objects.opening import open_objects
from tests.integration.syncer.conftest import LOCAL
from tests.support.raw_learner import (
    INT4,
    RawLearner,
    Stubs,
    attached,
    commit,
    connected,
    create_draft,
    create_run,
    delta_values,
    pull,
    push_messages,
    refused,
)

PRECONDITION = grpc.StatusCode.FAILED_PRECONDITION


@pytest.fixture
async def replicas(store_url: str) -> AsyncIterator[list[Stubs]]:
    """Connections to three replicas."""
    async with contextlib.AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(serving(open_objects(store_url), LOCAL)) for _ in range(3)]
        yield [await stack.enter_async_context(connected(server.port)) for server in servers]


@pytest.fixture
async def run(replicas: list[Stubs]) -> types.Run:
    return (await create_run(replicas[0]))[0]


async def _on_each(replicas: list[Stubs], run: types.Run) -> list[RawLearner]:
    return [await attached(stubs, run, f"on-{number}") for number, stubs in enumerate(replicas)]


async def test_what_one_replica_merges_and_closes_is_told_by_the_others(replicas: list[Stubs], run: types.Run) -> None:
    learners = await _on_each(replicas, run)
    base = await pull(replicas[1], run, "body")
    headers = [learners[1].header(base, "body")]
    await learners[1].push(headers[0], delta_values())
    for learner, stubs in zip(learners, replicas, strict=True):
        committed = (await learner.event("version_committed")).version_committed
        assert [delta.delta_id for delta in committed.merged] == [headers[0].delta_id]
        newest = await pull(stubs, run, "body", base=base)
        assert (newest.version, newest.plan.target.digest) == (1, committed.version.digest)
        assert (await learner.query(headers[0])).fate.fate == types.FATE_MERGED
    late = learners[1].header(newest, "body", steps=1)
    await learners[1].push(late, delta_values())
    await replicas[0].runs.CloseRun(runs.CloseRunRequest(name="demo"))
    for learner in learners:
        committed = (await learner.event("version_committed")).version_committed
        assert [delta.delta_id for delta in committed.merged] == [late.delta_id]
        assert (await learner.event("status_changed")).status_changed == types.RUN_STATUS_CLOSED
        with refused("RUN_CLOSED", PRECONDITION):
            await learner.event("version_committed")


async def test_an_answer_reflects_what_the_caller_has_seen_elsewhere(replicas: list[Stubs], run: types.Run) -> None:
    for number in range(5):
        change = types.Policy(max_staleness=10 + number)
        changed = await replicas[number % 3].runs.SetPolicy(
            runs.SetPolicyRequest(request_id=f"{number:032x}", name="demo", policy=change)
        )
        request = runs.GetRunRequest(name="demo", seen_position=changed.run.position)
        view = await replicas[(number + 1) % 3].runs.GetRun(request)
        assert view.run.policy.max_staleness == 10 + number


async def test_a_session_is_fenced_on_every_replica_however_old_the_newer_ones_checkpoint_is(
    replicas: list[Stubs], run: types.Run
) -> None:
    older = await attached(replicas[0], run)
    base = await pull(replicas[1], run, "body")
    newer = RawLearner(replicas[1], run, "eu", random.Random("newer"), seen_position=1)
    position = (await newer.attach()).run.position
    with refused("SESSION_FENCED", PRECONDITION):
        await older.event("version_committed")
    with refused("SESSION_FENCED", PRECONDITION):
        await older.push(older.header(base, "body"), delta_values())
    older.seen_position = position
    with refused("SESSION_FENCED", PRECONDITION):
        await older.attach()
    await newer.advance()


async def test_parts_of_one_push_may_land_on_different_replicas(replicas: list[Stubs], run: types.Run) -> None:
    learner = await attached(replicas[0], run)
    header = learner.header(await pull(replicas[0], run, "body"), "body")
    begin, *messages, complete = push_messages(header, delta_values(), INT4, parts=((0, 512), (512, 728)))
    end = [message.WhichOneof("kind") for message in messages].index("part_end") + 1
    states = []
    for stubs, rest in zip(replicas, (messages[:end], messages[end:], [complete]), strict=True):
        states.append((await stubs.exchange.PushDelta(iter([begin, *rest]))).state)
        if len(states) == 1:
            (part,) = (await learner.query(header)).parts
            assert (part.first, part.numel, part.digest) == (0, 512, messages[end - 1].part_end.digest)
    assert states == [*[exchange.PUSH_STATE_PARTS_STORED] * 2, exchange.PUSH_STATE_ACCEPTED]
    committed = (await learner.event("version_committed")).version_committed
    assert [delta.delta_id for delta in committed.merged] == [header.delta_id]


async def test_a_run_that_one_replica_committed_has_its_weights_on_the_others_as_soon_as_it_has_its_name(
    replicas: list[Stubs],
) -> None:
    for number in range(5):
        draft, _ = await create_draft(replicas[0], f"run-{number}")
        await replicas[1].runs.GetRun(runs.GetRunRequest(name=draft.name, run_uid=draft.uid))
        await commit(replicas[0], draft)
        view = (await replicas[1].runs.GetRun(runs.GetRunRequest(name=draft.name))).run
        assert [version.fragment for version in view.versions] == ["body", "head"]


async def test_what_a_learner_reports_to_one_replica_is_seen_on_the_others(
    replicas: list[Stubs], run: types.Run
) -> None:
    for step, learner in enumerate(await _on_each(replicas, run), 17):
        learner.step = step
        await learner.report()
    request = runs.GetRunRequest(name="demo")
    async with asyncio.timeout(20):
        for stubs in replicas:
            while [seen.report.step_count for seen in (await stubs.runs.GetRun(request)).learners] != [17, 18, 19]:
                await asyncio.sleep(0.05)
