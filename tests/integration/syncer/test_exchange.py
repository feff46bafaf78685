"""What learners and observers do with a run, over real sockets."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import TypeVar, cast

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from skerry.v1 import capabilities_pb2
from skerry.v1 import exchange_pb2 as exchange
from skerry.v1 import runs_pb2 as runs
from skerry.v1 import types_pb2 as types
from skerry_syncer.run.host import HostSettings
from skerry_syncer.run.push import MAX_PART_BYTES
from skerry_syncer.server import SyncerServer, serving
from skerry_syncer.store.objects.opening import open_objects
from tests.integration.syncer.conftest import LOCAL
from tests.support.raw_learner import (
    FLOAT32,
    INT4,
    Float32s,
    RawLearner,
    Stubs,
    apply_plan,
    connected,
    create_run,
    events_until,
    layout,
    observed,
    part_messages,
    pull,
    push_messages,
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
    attached = RawLearner(stubs, run, "eu", random.Random(1))
    await attached.attach()
    yield attached
    attached.detach()


def _values(seed: int, fragment: str = "body") -> Float32s:
    return (0.1 * np.random.default_rng(seed).standard_normal(layout(fragment).numel)).astype(np.float32)


async def _read(call: grpc.aio.UnaryStreamCall[Request, Message]) -> Message:
    """Returns the stream's next message, which there must be."""
    async with asyncio.timeout(20):
        message = await call.read()
    assert hasattr(message, "ListFields"), "the stream ended"
    return cast("Message", message)


async def _make_versions(learner: RawLearner, count: int) -> None:
    for _ in range(count):
        base = await pull(learner.stubs, learner.run, "body")
        await learner.push(learner.header(base, "body"), _values(base.version))
        await learner.event("version_committed")


async def test_capabilities_always_have_plain_float32(stubs: Stubs) -> None:
    offered = await stubs.capabilities.GetCapabilities(capabilities_pb2.GetCapabilitiesRequest())
    assert types.CODEC_FLOAT32 in offered.codecs
    assert types.COMPRESSOR_NONE in offered.compressors
    assert offered.api_version.startswith("1.")
    assert offered.suggested_part_size_bytes <= offered.max_part_size_bytes


async def test_the_stock_services_answer_beside_ours(stubs: Stubs, server: SyncerServer) -> None:
    health = health_pb2_grpc.HealthStub(stubs.channel)
    for service in ("", "skerry.v1.Exchange", "skerry.v1.Runs", "skerry.v1.Capabilities"):
        answer = await health.Check(health_pb2.HealthCheckRequest(service=service))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    reflection = reflection_pb2_grpc.ServerReflectionStub(stubs.channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    listed = await reflection.ServerReflectionInfo(iter([request])).read()
    names = {service.name for service in listed.list_services_response.service}
    assert {"skerry.v1.Exchange", "skerry.v1.Runs", "skerry.v1.Capabilities", "grpc.health.v1.Health"} <= names


async def test_attaching_tells_the_run_and_the_lease(learner: RawLearner, run: types.Run) -> None:
    attached = learner.attached
    assert attached is not None
    assert attached.run.uid == run.uid
    assert attached.lease_term.ToTimedelta().total_seconds() == pytest.approx(0.3)
    assert not attached.pending


async def test_a_round_is_told_of_at_the_first_message_of_a_push(
    stubs: Stubs, run: types.Run, learner: RawLearner
) -> None:
    other = RawLearner(stubs, run, "us", random.Random(2))
    await other.attach()
    header = other.header(await pull(stubs, run, "body"), "body")
    call = stubs.exchange.PushDelta(None)
    await call.write(exchange.PushDeltaRequest(header=header))
    opened = (await learner.event("round_opened")).round_opened
    assert (opened.fragment, opened.version) == ("body", 1)
    call.cancel()
    other.detach()


async def test_fewer_steps_than_h_open_no_round_but_are_merged_with_the_next(
    stubs: Stubs, run: types.Run, learner: RawLearner
) -> None:
    other = RawLearner(stubs, run, "us", random.Random(2))
    await other.attach()
    base = await pull(stubs, run, "body")
    early = other.header(base, "body", steps=1)
    assert (await other.push(early, _values(1))).fate.fate == types.FATE_PENDING
    late = learner.header(base, "body")
    await learner.push(late, _values(2))
    committed = (await learner.event("version_committed")).version_committed
    assert {one.delta_id for one in committed.merged} == {early.delta_id, late.delta_id}
    assert sum(one.weight_share for one in committed.merged) == pytest.approx(1)
    other.detach()


async def test_a_late_delta_is_merged_with_its_staleness(stubs: Stubs, run: types.Run, learner: RawLearner) -> None:
    other = RawLearner(stubs, run, "us", random.Random(2))
    await other.attach()
    base = await pull(stubs, run, "body")
    await _make_versions(learner, 2)
    late = other.header(base, "body")
    await other.push(late, _values(9))
    committed = (await learner.event("version_committed")).version_committed
    assert [(one.delta_id, one.staleness) for one in committed.merged] == [(late.delta_id, 2)]
    other.detach()


async def test_a_push_resumes_at_its_last_whole_part(stubs: Stubs, run: types.Run, learner: RawLearner) -> None:
    header = learner.header(await pull(stubs, run, "body"), "body")
    parts = ((0, 512), (512, 728))
    first, digest = part_messages(_values(1), layout("body"), INT4, *parts[0])
    answer = await stubs.exchange.PushDelta(iter([exchange.PushDeltaRequest(header=header), *first]))
    assert answer.state == exchange.PUSH_STATE_PARTS_STORED
    found = await learner.query(header)
    assert [(one.first, one.numel, one.digest) for one in found.parts] == [(0, 512, digest)]
    second, _ = part_messages(_values(1), layout("body"), INT4, *parts[1])
    complete = push_messages(header, _values(1), INT4, parts=parts)[-1]
    answer = await stubs.exchange.PushDelta(iter([exchange.PushDeltaRequest(header=header), *second, complete]))
    assert answer.state == exchange.PUSH_STATE_ACCEPTED


async def test_several_processes_push_parts_of_one_delta_at_once(
    stubs: Stubs, run: types.Run, learner: RawLearner
) -> None:
    header = learner.header(await pull(stubs, run, "body"), "body")
    parts = ((0, 256), (256, 256), (512, 728))

    async def one(first: int, numel: int) -> None:
        messages, _ = part_messages(_values(1), layout("body"), INT4, first, numel)
        await stubs.exchange.PushDelta(iter([exchange.PushDeltaRequest(header=header), *messages]))

    async with asyncio.TaskGroup() as tasks:
        for part in reversed(parts):
            tasks.create_task(one(*part))
    complete = push_messages(header, _values(1), INT4, parts=parts)[-1]
    answer = await stubs.exchange.PushDelta(iter([exchange.PushDeltaRequest(header=header), complete]))
    assert answer.state == exchange.PUSH_STATE_ACCEPTED


async def test_nothing_is_known_of_a_push_that_never_came(learner: RawLearner, stubs: Stubs, run: types.Run) -> None:
    found = await learner.query(learner.header(await pull(stubs, run, "body"), "body"))
    assert found.state == exchange.PUSH_STATE_UNSPECIFIED
    assert not found.parts


async def test_a_follower_of_the_chain_has_the_weights_of_a_snapshot_bit_for_bit(
    stubs: Stubs, run: types.Run, learner: RawLearner
) -> None:
    followed = await pull(stubs, run, "body")
    await _make_versions(learner, 3)
    updated = await pull(stubs, run, "body", base=followed)
    fresh = await pull(stubs, run, "body")
    assert (updated.version, fresh.version) == (3, 3)
    assert {one.kind for one in updated.plan.objects} == {exchange.OBJECT_KIND_UPDATE}
    assert np.array_equal(updated.values, fresh.values)
    assert sum(one.size_bytes for one in updated.plan.objects) < sum(one.size_bytes for one in fresh.plan.objects)


async def test_a_snapshot_is_stored_when_the_updates_outweigh_it(
    stubs: Stubs, run: types.Run, learner: RawLearner
) -> None:
    await _make_versions(learner, 9)
    found = await stubs.runs.ListVersions(runs.ListVersionsRequest(name=run.name, fragment="body"))
    snapshots = [one.version.version for one in found.versions if one.has_snapshot]
    assert 0 in snapshots
    assert max(snapshots) > 0
    fresh = await pull(stubs, run, "body")
    assert fresh.plan.objects[0].version == max(snapshots)


async def test_a_download_goes_on_by_object_and_offset(stubs: Stubs, run: types.Run, learner: RawLearner) -> None:
    await _make_versions(learner, 2)
    request = exchange.PullFragmentRequest(run=run.name, run_uid=run.uid, fragment="body", from_version=-1)
    request.is_newest = True
    call = stubs.exchange.PullFragment(request)
    plan = (await _read(call)).plan
    received = [bytearray() for _ in plan.objects]
    received[0] += (await _read(call)).data.data[:1000]
    call.cancel()
    await _make_versions(learner, 1)  # the newest moves on, the plan does not
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
    await _make_versions(learner, 2)
    request = exchange.PullFragmentRequest(run=run.name, run_uid=run.uid, fragment="body", from_version=0)
    request.target_version, request.limit_bytes = 2, limit_bytes
    answers = [response async for response in stubs.exchange.PullFragment(request)]
    whole_bytes = sum(one.size_bytes for one in answers[0].plan.objects)
    assert len(answers[0].plan.objects) == 2
    assert sum(len(answer.data.data) for answer in answers[1:]) == min(limit_bytes, whole_bytes)
    request.limit_bytes = -1
    with refused("BAD_REQUEST", grpc.StatusCode.INVALID_ARGUMENT):
        await _read(stubs.exchange.PullFragment(request))


async def test_a_session_that_comes_back_is_told_what_is_pending(
    stubs: Stubs, run: types.Run, learner: RawLearner
) -> None:
    header = learner.header(await pull(stubs, run, "body"), "body", steps=1)
    await learner.push(header, _values(1))
    learner.detach()
    attached = await learner.attach()
    assert [one.delta_id for one in attached.pending] == [header.delta_id]


async def test_a_learner_that_left_is_no_longer_expected(stubs: Stubs, run: types.Run, learner: RawLearner) -> None:
    await learner.leave()
    found = await stubs.runs.GetRun(runs.GetRunRequest(name=run.name))
    assert [(one.learner_id, one.is_live) for one in found.learners] == [("eu", False)]
    await learner.attach()
    found = await stubs.runs.GetRun(runs.GetRunRequest(name=run.name))
    assert [(one.learner_id, one.is_live) for one in found.learners] == [("eu", True)]


async def test_a_newer_session_is_told_of_the_pending_delta_and_its_own_replaces_it(stubs: Stubs) -> None:
    run, _ = await create_run(stubs, policy=types.Policy(inner_step_count=4, quorum_count=2))
    learner = RawLearner(stubs, run, "eu", random.Random(1))
    await learner.attach()
    base = await pull(stubs, run, "body")
    older = learner.header(base, "body", steps=1)
    await learner.push(older, _values(1))
    newer = RawLearner(stubs, run, "eu", random.Random(3))
    attached = await newer.attach()
    assert [(one.delta_id, one.fate) for one in attached.pending] == [(older.delta_id, types.FATE_PENDING)]
    header = newer.header(base, "body")
    await newer.push(header, _values(2))
    (fate,) = (await newer.event("fates_decided")).fates_decided.fates
    assert (fate.delta_id, fate.fate) == (older.delta_id, types.FATE_SUPERSEDED)
    learner.detach()
    newer.detach()


async def test_an_observer_sees_the_past_and_then_the_present(
    stubs: Stubs, run: types.Run, learner: RawLearner
) -> None:
    await _make_versions(learner, 2)
    call = stubs.exchange.Watch(exchange.WatchRequest(run=run.name, after_position=1))
    start = (await _read(call)).start
    assert start.run.position == (await stubs.runs.GetRun(runs.GetRunRequest(name=run.name))).run.position
    assert [one.learner_id for one in start.learners] == ["eu"]
    committed: list[tuple[str, int]] = []
    positions = [1]
    await _push_soon(learner)
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


async def _push_soon(learner: RawLearner) -> None:
    base = await pull(learner.stubs, learner.run, "body")
    await learner.push(learner.header(base, "body"), _values(5))


async def test_a_learner_hears_of_its_own_deltas_and_an_observer_of_all(
    stubs: Stubs, run: types.Run, learner: RawLearner
) -> None:
    other, observer = RawLearner(stubs, run, "us", random.Random(2)), await observed(stubs, run)
    await other.attach()
    await _push_soon(learner)
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
        learner = RawLearner(other, run, "us", random.Random(4))
        await learner.attach()
        draining = asyncio.create_task(server.host.drain(5.0))
        assert (await learner.event("draining")).draining.grace.seconds == 5
        with refused("DRAINING", grpc.StatusCode.UNAVAILABLE):
            await learner.event("status_changed")
        await draining
        with refused("DRAINING", grpc.StatusCode.UNAVAILABLE) as caught:
            await learner.attach()
        assert caught.refusal.retry_after_s is not None


async def test_pushes_that_share_a_small_budget_are_all_accepted(store_url: str) -> None:
    settings = replace(LOCAL, host=HostSettings(in_flight_bytes=2_000))
    async with serving(open_objects(store_url), settings) as server, connected(server.port) as stubs:
        run, _ = await create_run(stubs)
        base = await pull(stubs, run, "body")
        values = np.random.default_rng(1).standard_normal(base.values.size).astype(np.float32)

        async def push(name: str) -> exchange.PushDeltaResponse:
            learner = RawLearner(stubs, run, name, random.Random(name))
            await learner.attach()
            answer = await learner.push(learner.header(base, "body"), values, FLOAT32)
            learner.detach()
            return answer

        answers = await asyncio.gather(*(push(f"learner-{number}") for number in range(12)))
        assert {answer.state for answer in answers} == {exchange.PUSH_STATE_ACCEPTED}
        assert server.host.budget.peak_bytes == MAX_PART_BYTES, "one part of a size that was not stated"
        assert server.host.budget.used_bytes == 0
