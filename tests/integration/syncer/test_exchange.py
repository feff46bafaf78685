"""What learners and observers do with a run, over real sockets."""

from __future__ import annotations

import asyncio
import random
import time

import grpc
from grpc_reflection.v1alpha import reflection_pb2

from skerry.v1 import exchange_pb2 as exchange
from skerry.v1 import runs_pb2 as runs
from skerry.v1 import types_pb2 as types
from skerry.wire.frames import parse_frames
from skerry_syncer.server import SyncerServer
from tests.support.raw_learner import (
    LONG,
    Observer,
    RawLearner,
    Stubs,
    apply_plan,
    attached,
    create_run,
    delta_values,
    events_until,
    layout,
    observed,
    pull,
    quick,
    refused,
)


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


async def test_updates_outweigh_a_snapshot_and_then_a_newer_one_is_stored_whose_weights_are_those_of_the_updates(
    stubs: Stubs, run: types.Run, learner: RawLearner
) -> None:
    followed = await pull(stubs, run, "body")
    for seed in range(9):
        await learner.advance(seed)
        followed = await pull(stubs, run, "body", base=followed)
        assert {planned.kind for planned in followed.plan.objects} == {exchange.OBJECT_KIND_UPDATE}
    fresh = await pull(stubs, run, "body")
    snapshot, *updates = fresh.plan.objects
    assert (snapshot.kind, len(updates)) == (exchange.OBJECT_KIND_SNAPSHOT, 9 - snapshot.version)
    assert 0 < snapshot.version < 9
    assert followed.values.tobytes() == fresh.values.tobytes()
    older = await pull(stubs, run, "body", base=fresh, target=0)
    assert (older.version, older.plan.from_version) == (0, -1)


async def test_a_download_goes_on_by_object_and_offset(
    server: SyncerServer, stubs: Stubs, run: types.Run, learner: RawLearner
) -> None:
    await learner.advance()
    request = exchange.PullFragmentRequest(run=run.name, run_uid=run.uid, fragment="body", from_version=-1)
    request.is_newest, request.limit_bytes = True, 1000
    described, data = [answer async for answer in stubs.exchange.PullFragment(request)]
    plan = described.plan
    received = [bytearray() for _ in plan.objects]
    received[0] += data.data.data
    assert len(received[0]) == 1000
    await learner.advance()  # the newest moves on, the plan does not
    request.target_version, request.is_newest, request.limit_bytes = plan.target.version, False, 0
    request.resume.objects.extend(planned.name for planned in plan.objects)
    request.resume.offset = 1000
    for place in ((len(plan.objects) + 1, 0), (-1, 0), (0, plan.objects[0].size_bytes + 1), (0, -1)):
        beyond = exchange.PullFragmentRequest()
        beyond.CopyFrom(request)
        beyond.resume.object_index, beyond.resume.offset = place
        with refused("BAD_REQUEST", grpc.StatusCode.INVALID_ARGUMENT):
            await stubs.exchange.PullFragment(beyond).read()
    resumed, *rest = [answer async for answer in stubs.exchange.PullFragment(request)]
    assert (resumed.plan.target, list(resumed.plan.objects)) == (plan.target, list(plan.objects))
    for answer in rest:
        assert len(received[answer.data.object_index]) == answer.data.offset
        received[answer.data.object_index] += answer.data.data
    apply_plan(plan, received, layout("body"), None)
    assert server.host.budget.used_bytes == 0


async def test_a_learner_that_left_is_no_longer_expected(stubs: Stubs) -> None:
    run, _ = await create_run(stubs, policy=quick(lease_term=LONG))
    learner = await attached(stubs, run)
    for is_live in (False, True):
        if is_live:
            await learner.attach()
        else:
            await learner.leave()
        (seen,) = (await stubs.runs.GetRun(runs.GetRunRequest(name=run.name))).learners
        assert (seen.learner_id, seen.is_live) == ("eu", is_live)


async def test_a_newer_session_is_told_of_the_pending_delta_and_its_own_replaces_it(stubs: Stubs) -> None:
    run, _ = await create_run(stubs, policy=types.Policy(inner_step_count=4, quorum_count=2))
    learner = await attached(stubs, run)
    base = await pull(stubs, run, "body")
    older = learner.header(base, "body", steps=1)
    await learner.push(older, delta_values(1))
    newer = RawLearner(stubs, run, "eu", random.Random(3))
    answer = await newer.attach()
    assert [(delta.delta_id, delta.fate) for delta in answer.pending] == [(older.delta_id, types.FATE_PENDING)]
    await newer.push(newer.header(base, "body"), delta_values(2))
    (fate,) = (await newer.event("fates_decided")).fates_decided.fates
    assert (fate.delta_id, fate.fate) == (older.delta_id, types.FATE_SUPERSEDED)


async def test_an_observer_sees_the_past_and_then_the_present(
    stubs: Stubs, run: types.Run, learner: RawLearner
) -> None:
    await learner.advance()
    call = Observer(stubs, run, after_position=1)
    start = (await call.read()).start
    assert start.run.position == (await stubs.runs.GetRun(runs.GetRunRequest(name=run.name))).run.position
    assert [seen.learner_id for seen in start.learners] == ["eu"]
    await learner.push(learner.header(await pull(stubs, run, "body"), "body"), delta_values())
    events = [event for _ in range(4) for event in await events_until(call, "version_committed")]
    versions = [event.version_committed.version for event in events if event.HasField("version_committed")]
    committed = [(version.fragment, version.version) for version in versions]
    # The initial weights of several fragments are stored side by side.
    assert (sorted(committed[:2]), committed[2:]) == ([("body", 0), ("head", 0)], [("body", 1), ("body", 2)])
    positions = [event.position for event in events]
    assert positions == sorted(positions)
    learner.step = 17
    await learner.report()
    while (event := (await events_until(call, "learner"))[-1]).learner.report.step_count != 17:
        pass
    assert event.learner.learner_id == "eu"


async def test_a_learner_hears_of_its_own_deltas_and_an_observer_of_all(
    stubs: Stubs, run: types.Run, learner: RawLearner
) -> None:
    other, observer = await attached(stubs, run, "us"), await observed(stubs, run)
    await learner.push(learner.header(await pull(stubs, run, "body"), "body"), delta_values())
    heard = [
        {event.WhichOneof("kind") for event in await events_until(call, "version_committed")}
        for call in (other.call, learner.call, observer)
    ]
    of_its_own, of_all = {"delta_accepted"}, {"delta_accepted", "round_closed"}
    assert [kinds & of_all for kinds in heard] == [set(), of_its_own, of_all]


async def test_the_past_says_when_each_delta_came_and_what_is_in_it(
    stubs: Stubs, run: types.Run, learner: RawLearner
) -> None:
    started_s = time.time()
    header = learner.header(await pull(stubs, run, "body"), "body")
    await learner.push(header, delta_values())
    await learner.event("version_committed")
    past = await events_until(await observed(stubs, run, after_position=1), "round_closed")
    accepted = [event for event in past if event.HasField("delta_accepted")][-1]
    assert abs(accepted.time.ToNanoseconds() / 1e9 - started_s) < 60.0
    delta = accepted.delta_accepted
    assert (delta.step_count, delta.token_count) == (header.step_count, header.token_count)
    assert delta.size_bytes > 0


async def test_an_event_without_a_kind_ends_the_past(stubs: Stubs, run: types.Run) -> None:
    call = Observer(stubs, run, after_position=1)
    position = (await call.read()).start.run.position
    async with asyncio.timeout(20):
        while (event := (await call.read()).event).WhichOneof("kind") is not None:
            assert event.position <= position
    assert event == types.Event(position=position)


async def test_an_attached_learner_of_a_deleted_run_is_told(stubs: Stubs, run: types.Run, learner: RawLearner) -> None:
    await stubs.runs.DeleteRun(runs.DeleteRunRequest(name=run.name, run_uid=run.uid))
    with refused("RUN_NOT_FOUND", grpc.StatusCode.NOT_FOUND):
        await learner.event("status_changed")


async def test_an_answer_says_what_becomes_of_a_vector_codec_that_has_no_effect(stubs: Stubs) -> None:
    plain = types.Encoding(codec=types.CODEC_FLOAT32, vector_codec=types.CODEC_INT8, compressor=types.COMPRESSOR_NONE)
    run, _ = await create_run(stubs, policy=quick(update_encoding=plain))
    assert run.policy.update_encoding.vector_codec == types.CODEC_FLOAT32
    await (await attached(stubs, run)).advance()
    request = exchange.PullFragmentRequest(run="demo", fragment="body", from_version=0, is_newest=True)
    data = b"".join([answer.data.data async for answer in stubs.exchange.PullFragment(request)])
    assert {frame.codec for frame in parse_frames(data)} == {"float32"}


async def test_reflection_describes_every_service(stubs: Stubs) -> None:
    method = stubs.channel.stream_unary(
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    listed = await method(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
    names = {service.name for service in listed.list_services_response.service}
    assert {"skerry.v1.Capabilities", "skerry.v1.Exchange", "skerry.v1.Runs", "grpc.health.v1.Health"} <= names
    for name in names:
        described = await method(iter([reflection_pb2.ServerReflectionRequest(file_containing_symbol=name)]))
        assert described.file_descriptor_response.file_descriptor_proto, name
