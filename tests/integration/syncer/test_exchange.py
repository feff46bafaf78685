"""What learners and observers do with a run, over real sockets."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import TypeVar, cast

import grpc
import numpy as np
import pytest

from skerry.v1 import capabilities_pb2
from skerry.v1 import exchange_pb2 as exchange
from skerry.v1 import runs_pb2 as runs
from skerry.v1 import types_pb2 as types
from skerry_syncer.server import SyncerServer
from tests.support.raw_learner import (
    RawLearner,
    Stubs,
    apply_plan,
    attached,
    connected,
    create_run,
    delta_values,
    events_until,
    layout,
    observed,
    pull,
    refused,
)

Request = TypeVar("Request")
Message = TypeVar("Message")


@pytest.fixture
async def run(stubs: Stubs) -> types.Run:
    created, _ = await create_run(stubs)
    return created


@pytest.fixture
async def learner(stubs: Stubs, run: types.Run) -> AsyncIterator[RawLearner]:
    eu = await attached(stubs, run)
    yield eu
    eu.detach()


async def _read(call: grpc.aio.UnaryStreamCall[Request, Message]) -> Message:
    """Returns the stream's next message, which there must be."""
    async with asyncio.timeout(20):
        message = await call.read()
    assert hasattr(message, "ListFields"), "the stream ended"
    return cast("Message", message)


async def test_capabilities_always_have_plain_float32(stubs: Stubs) -> None:
    offered = await stubs.capabilities.GetCapabilities(capabilities_pb2.GetCapabilitiesRequest())
    assert types.CODEC_FLOAT32 in offered.codecs
    assert types.COMPRESSOR_NONE in offered.compressors
    assert offered.api_version.startswith("1.")
    assert offered.suggested_part_size_bytes <= offered.max_part_size_bytes


async def test_a_round_is_told_of_at_the_first_message_of_a_push(
    stubs: Stubs, run: types.Run, learner: RawLearner
) -> None:
    other = await attached(stubs, run, "us")
    header = other.header(await pull(stubs, run, "body"), "body")
    call = stubs.exchange.PushDelta(None)
    await call.write(exchange.PushDeltaRequest(header=header))
    opened = (await learner.event("round_opened")).round_opened
    assert (opened.fragment, opened.version) == ("body", 1)
    call.cancel()
    other.detach()


async def test_a_follower_of_the_chain_has_the_weights_of_a_snapshot_bit_for_bit(
    stubs: Stubs, run: types.Run, learner: RawLearner
) -> None:
    followed = await pull(stubs, run, "body")
    for _ in range(3):
        await learner.advance()
    updated = await pull(stubs, run, "body", base=followed)
    fresh = await pull(stubs, run, "body")
    assert (updated.version, fresh.version) == (3, 3)
    assert {one.kind for one in updated.plan.objects} == {exchange.OBJECT_KIND_UPDATE}
    assert np.array_equal(updated.values, fresh.values)
    assert sum(one.size_bytes for one in updated.plan.objects) < sum(one.size_bytes for one in fresh.plan.objects)


async def test_a_snapshot_is_stored_when_the_updates_outweigh_it(
    stubs: Stubs, run: types.Run, learner: RawLearner
) -> None:
    for _ in range(9):
        await learner.advance()
    found = await stubs.runs.ListVersions(runs.ListVersionsRequest(name=run.name, fragment="body"))
    snapshots = [one.version.version for one in found.versions if one.has_snapshot]
    assert 0 in snapshots
    assert max(snapshots) > 0
    fresh = await pull(stubs, run, "body")
    assert fresh.plan.objects[0].version == max(snapshots)


async def test_a_download_goes_on_by_object_and_offset(stubs: Stubs, run: types.Run, learner: RawLearner) -> None:
    for _ in range(2):
        await learner.advance()
    request = exchange.PullFragmentRequest(run=run.name, run_uid=run.uid, fragment="body", from_version=-1)
    request.is_newest = True
    call = stubs.exchange.PullFragment(request)
    plan = (await _read(call)).plan
    received = [bytearray() for _ in plan.objects]
    received[0] += (await _read(call)).data.data[:1000]
    call.cancel()
    await learner.advance()  # the newest moves on, the plan does not
    request.target_version, request.is_newest = plan.target.version, False
    request.resume.objects.extend(one.name for one in plan.objects)
    request.resume.offset = 1000
    async for response in stubs.exchange.PullFragment(request):
        if response.WhichOneof("kind") == "plan":
            assert response.plan.target == plan.target
            assert list(response.plan.objects) == list(plan.objects)
        else:
            assert len(received[response.data.object_index]) == response.data.offset
            received[response.data.object_index] += response.data.data
    apply_plan(plan, received, layout("body"), None)


@pytest.mark.parametrize("limit_bytes", [1, 700, 2**20])
async def test_a_download_ends_at_its_limit(
    stubs: Stubs, run: types.Run, learner: RawLearner, limit_bytes: int
) -> None:
    for _ in range(2):
        await learner.advance()
    request = exchange.PullFragmentRequest(run=run.name, run_uid=run.uid, fragment="body", from_version=0)
    request.target_version, request.limit_bytes = 2, limit_bytes
    answers = [response async for response in stubs.exchange.PullFragment(request)]
    whole_bytes = sum(one.size_bytes for one in answers[0].plan.objects)
    assert len(answers[0].plan.objects) == 2
    assert sum(len(answer.data.data) for answer in answers[1:]) == min(limit_bytes, whole_bytes)
    request.limit_bytes = -1
    with refused("BAD_REQUEST", grpc.StatusCode.INVALID_ARGUMENT):
        await _read(stubs.exchange.PullFragment(request))


async def test_a_learner_that_left_is_no_longer_expected(stubs: Stubs, run: types.Run, learner: RawLearner) -> None:
    await learner.leave()
    found = await stubs.runs.GetRun(runs.GetRunRequest(name=run.name))
    assert [(seen.learner_id, seen.is_live) for seen in found.learners] == [("eu", False)]
    await learner.attach()
    found = await stubs.runs.GetRun(runs.GetRunRequest(name=run.name))
    assert [(seen.learner_id, seen.is_live) for seen in found.learners] == [("eu", True)]


async def test_a_newer_session_is_told_of_the_pending_delta_and_its_own_replaces_it(stubs: Stubs) -> None:
    run, _ = await create_run(stubs, policy=types.Policy(inner_step_count=4, quorum_count=2))
    learner = await attached(stubs, run)
    base = await pull(stubs, run, "body")
    older = learner.header(base, "body", steps=1)
    await learner.push(older, delta_values(1))
    newer = RawLearner(stubs, run, "eu", random.Random(3))
    answer = await newer.attach()
    assert [(delta.delta_id, delta.fate) for delta in answer.pending] == [(older.delta_id, types.FATE_PENDING)]
    assert (answer.run.uid, answer.lease_term.seconds) == (run.uid, 15)
    header = newer.header(base, "body")
    await newer.push(header, delta_values(2))
    (fate,) = (await newer.event("fates_decided")).fates_decided.fates
    assert (fate.delta_id, fate.fate) == (older.delta_id, types.FATE_SUPERSEDED)
    learner.detach()
    newer.detach()


async def test_an_observer_sees_the_past_and_then_the_present(
    stubs: Stubs, run: types.Run, learner: RawLearner
) -> None:
    for _ in range(2):
        await learner.advance()
    call = stubs.exchange.Watch(exchange.WatchRequest(run=run.name, after_position=1))
    start = (await _read(call)).start
    assert start.run.position == (await stubs.runs.GetRun(runs.GetRunRequest(name=run.name))).run.position
    assert [seen.learner_id for seen in start.learners] == ["eu"]
    committed: list[tuple[str, int]] = []
    positions = [1]
    await learner.push(learner.header(await pull(stubs, run, "body"), "body"), delta_values())
    while len(committed) < 5:
        event = (await _read(call)).event
        positions.append(event.position)
        if event.WhichOneof("kind") == "version_committed":
            committed.append((event.version_committed.version.fragment, event.version_committed.version.version))
    # The initial weights of several fragments are stored side by side.
    assert sorted(committed[:2]) == [("body", 0), ("head", 0)]
    assert committed[2:] == [("body", 1), ("body", 2), ("body", 3)]
    assert positions == sorted(positions)
    call.cancel()


async def test_a_learner_hears_of_its_own_deltas_and_an_observer_of_all(
    stubs: Stubs, run: types.Run, learner: RawLearner
) -> None:
    other, observer = await attached(stubs, run, "us"), await observed(stubs, run)
    await learner.push(learner.header(await pull(stubs, run, "body"), "body"), delta_values())
    assert other.call is not None
    assert learner.call is not None
    heard = [
        {event.WhichOneof("kind") for event in await events_until(call, "version_committed")}
        for call in (other.call, learner.call, observer)
    ]
    of_its_own, of_all = {"delta_accepted"}, {"delta_accepted", "round_closed"}
    assert [kinds & of_all for kinds in heard] == [set(), of_its_own, of_all]
    other.detach()
    observer.cancel()


async def test_an_observer_sees_reports(stubs: Stubs, run: types.Run, learner: RawLearner) -> None:
    call = stubs.exchange.Watch(exchange.WatchRequest(run=run.name))
    await _read(call)
    learner.step = 17
    await learner.report()
    while (event := (await _read(call)).event).learner.report.step_count != 17:
        pass
    assert (event.learner.learner_id, event.learner.is_live) == ("eu", True)
    call.cancel()


async def test_an_attached_learner_of_a_deleted_run_is_told(stubs: Stubs, run: types.Run, learner: RawLearner) -> None:
    await stubs.runs.DeleteRun(runs.DeleteRunRequest(name=run.name, run_uid=run.uid))
    with refused("RUN_NOT_FOUND", grpc.StatusCode.NOT_FOUND):
        await learner.event("status_changed")


async def test_a_drained_server_refuses_and_says_where_to_go(server: SyncerServer, run: types.Run) -> None:
    async with connected(server.port) as other:
        learner = await attached(other, run)
        draining = asyncio.create_task(server.host.drain(5.0))
        assert (await learner.event("draining")).draining.grace.seconds == 5
        with refused("DRAINING", grpc.StatusCode.UNAVAILABLE):
            await learner.event("status_changed")
        await draining
        with refused("DRAINING", grpc.StatusCode.UNAVAILABLE) as caught:
            await learner.attach()
        assert caught.refusal.retry_after_s is not None
