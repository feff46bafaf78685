"""Quotas hold whatever way around them a client tries: several streams, repetitions, many small things."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import replace

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from skerry import ArrayLearner
from skerry.runtime.clock import SystemClock
from skerry.v1 import exchange_pb2 as exchange
from skerry.v1 import runs_pb2 as runs
from skerry.v1 import types_pb2 as types
from skerry.wire.digests import part_digest
from skerry_syncer.access import limits as quotas
from skerry_syncer.access.caller import CALLER, Caller
from skerry_syncer.access.limits import orphans
from skerry_syncer.errors import SyncerError
from skerry_syncer.rpc import exchange as exchange_service
from skerry_syncer.rpc import interceptor, refusals
from skerry_syncer.rpc.refusals import Refusals
from skerry_syncer.run import host, push
from skerry_syncer.run.host import HostSettings
from skerry_syncer.server import serving
from skerry_syncer.store.log.entries import INITIAL_BASE, ObjectRef
from skerry_syncer.store.objects.opening import open_objects
from skerry_syncer.store.versions.blobs import StoredPart, summed_norms
from tests.integration.syncer.conftest import LOCAL
from tests.support import forgery
from tests.support.dict_objects import DictObjects
from tests.support.raw_learner import (
    FLOAT32,
    Pulled,
    RawLearner,
    Stubs,
    connected,
    create_run,
    hex_id,
    layout,
    pull,
    push_messages,
    refused,
    send,
)
from tests.support.still_clock import StillClock

EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
INVALID = grpc.StatusCode.INVALID_ARGUMENT
BODY = layout("body").numel


async def test_streams_of_one_session_share_the_rate_of_its_reports(stubs: Stubs) -> None:
    run, _ = await create_run(stubs)
    streams = [RawLearner(stubs, run, "us", random.Random(1)) for _ in range(10)]
    for one in streams:
        one.session = streams[0].session
        await one.attach()
    watch = stubs.exchange.Watch(exchange.WatchRequest(run="demo"))
    await watch.read()
    for one in streams:
        for one.step in range(50):
            await one.report()
    events = list[object]()

    async def watching() -> None:
        while isinstance(event := await watch.read(), exchange.WatchResponse):
            events.append(event)

    await asyncio.wait([asyncio.create_task(watching())], timeout=1)
    watch.cancel()
    assert 5 < len(events) < 40  # a second has 20 pauses
    for one in streams:
        one.detach()


async def test_who_leaves_and_comes_back_is_counted_each_time(store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "SESSION_BURST", 3)
    monkeypatch.setattr(host, "SESSION_PAUSE_S", 1000.0)
    async with serving(open_objects(store_url), LOCAL) as server, connected(server.port) as stubs:
        run, _ = await create_run(stubs)
        learner = RawLearner(stubs, run, "us", random.Random(1))
        with refused("QUOTA_EXCEEDED", EXHAUSTED):
            for _ in range(6):
                await learner.attach()
                await learner.leave()


def test_of_a_delta_that_is_accepted_what_it_does_not_use_is_still_counted() -> None:
    parts = orphans(SystemClock(), 0)
    parts.stored("a", "delta", 3 * 2**29)
    parts.finished("delta", [2**29])
    parts.check("a", 0)
    with pytest.raises(SyncerError, match="complete them"):
        parts.check("a", 1)
    parts.finished("delta")
    parts.check("a", 2**30)


async def test_a_part_that_is_sent_again_and_again_is_counted_though_its_delta_is_accepted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(quotas, "ORPHAN_BYTES", 200_000)  # and sixteen times the size of the run
    async with serving(DictObjects(), LOCAL) as server, connected(server.port) as stubs:
        run, _ = await create_run(stubs)
        learner = RawLearner(stubs, run, "us", random.Random(1))
        await learner.attach()
        base = await pull(stubs, run, "body")

        async def newer(before: Pulled) -> Pulled:
            while (found := await pull(stubs, run, "body")).version == before.version:
                await asyncio.sleep(0.01)
            return found

        with refused("QUOTA_EXCEEDED", EXHAUSTED):
            for _ in range(10):
                messages = push_messages(learner.header(base, "body"), np.ones(BODY, np.float32), FLOAT32)
                await send(stubs, [messages[0], *10 * messages[1:-1], messages[-1]])
                base = await newer(base)
        learner.detach()


async def test_of_a_part_its_header_counts_too() -> None:
    count, source = 2000, random.Random(1)
    settings = replace(LOCAL, host=replace(LOCAL.host, draft_bytes=200_000))
    async with serving(DictObjects(), settings) as server, connected(server.port) as stubs:
        draft = await stubs.runs.CreateRun(
            runs.CreateRunRequest(
                request_id=hex_id(source),
                name="many",
                tensors=[types.Tensor(name=f"t{at}", shape=[1], dtype="float32") for at in range(count)],
                fragments=[types.Fragment(name="all", tensors=[f"t{at}" for at in range(count)])],
            )
        )
        header = exchange.PushHeader(
            run="many",
            run_uid=draft.run.uid,
            learner_id="us",
            session_id=hex_id(random.Random(1)),
            delta_id=hex_id(source),
            fragment="all",
            base_version=INITIAL_BASE,
        )
        with refused("QUOTA_EXCEEDED", EXHAUSTED):
            await send(stubs, [exchange.PushDeltaRequest(header=header), *_parts_of_one(30)])


def _parts_of_one(count: int) -> Sequence[exchange.PushDeltaRequest]:
    messages = []
    for first in range(count):
        value = np.ones(1, np.float32)
        digest = part_digest()
        digest.update(value.tobytes())
        messages += [
            exchange.PushDeltaRequest(part=exchange.PartBegin(first=first, numel=1)),
            exchange.PushDeltaRequest(data=forgery.float32_frame(value, first=first)),
            exchange.PushDeltaRequest(part_end=exchange.PartEnd(digest=digest.digest())),
        ]
    return messages


async def test_a_client_follows_a_bounded_number_of_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange_service, "MOST_CLIENT_WATCHES", 3)
    async with serving(DictObjects(), LOCAL) as server, connected(server.port) as stubs:
        await create_run(stubs)
        watches = [stubs.exchange.Watch(exchange.WatchRequest(run="demo")) for _ in range(4)]
        for watch in watches[:3]:
            await watch.read()
        with refused("QUOTA_EXCEEDED", EXHAUSTED):
            await watches[3].read()
        for watch in watches:
            watch.cancel()


async def test_messages_to_reflection_come_at_a_rate_and_health_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interceptor, "FOREIGN_BURST", 5)
    monkeypatch.setattr(interceptor, "FOREIGN_PAUSE_S", 1000.0)
    async with serving(DictObjects(), LOCAL) as server, connected(server.port) as stubs:
        reflection = reflection_pb2_grpc.ServerReflectionStub(stubs.channel)
        request = reflection_pb2.ServerReflectionRequest(file_containing_symbol="skerry.v1.Runs")
        call = reflection.ServerReflectionInfo()
        for _ in range(5):
            await call.write(request)
            assert (await call.read()).file_descriptor_response.file_descriptor_proto
        with refused("QUOTA_EXCEEDED", EXHAUSTED):
            await call.write(request)
            await call.read()
        with refused("QUOTA_EXCEEDED", EXHAUSTED):
            await reflection.ServerReflectionInfo(iter([request])).read()
        await health_pb2_grpc.HealthStub(stubs.channel).Check(health_pb2.HealthCheckRequest())


async def test_memory_that_nobody_uses_is_taken_back_when_others_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(push, "SCARCE_GRACE_S", 0.3)
    settings = replace(LOCAL, host=HostSettings(part_budget_bytes=2**20))
    async with serving(DictObjects(), settings) as server, connected(server.port) as stubs:
        run, _ = await create_run(stubs)
        base = await pull(stubs, run, "body")
        idle, honest = (RawLearner(stubs, run, name, random.Random(name)) for name in ("idle", "honest"))
        await idle.attach()
        await honest.attach()
        call = stubs.exchange.PushDelta(None)
        await call.write(exchange.PushDeltaRequest(header=idle.header(base, "body")))
        begin = exchange.PartBegin(first=0, numel=BODY, size_bytes=2**20)
        await call.write(exchange.PushDeltaRequest(part=begin))
        while not server.host.budget.used_bytes:
            await asyncio.sleep(0.01)
        began_s = time.monotonic()
        answer = await honest.push(honest.header(base, "body"), np.ones(BODY, np.float32))
        assert answer.state == exchange.PUSH_STATE_ACCEPTED
        assert time.monotonic() - began_s < 5  # the grace without others is 20 s
        with refused("TOO_SLOW", EXHAUSTED):
            await call
        for one in (idle, honest):
            one.detach()


async def test_many_that_begin_to_wait_while_a_part_is_given_up_get_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(push, "SCARCE_GRACE_S", 0.0)
    settings = replace(LOCAL, host=HostSettings(part_budget_bytes=2**20))
    async with serving(DictObjects(), settings) as server, connected(server.port) as stubs:
        run, _ = await create_run(stubs)
        idle = RawLearner(stubs, run, "idle", random.Random(1))
        await idle.attach()
        call = stubs.exchange.PushDelta(None)
        await call.write(exchange.PushDeltaRequest(header=idle.header(await pull(stubs, run, "body"), "body")))
        begin = exchange.PartBegin(first=0, numel=BODY, size_bytes=2**20)
        await call.write(exchange.PushDeltaRequest(part=begin))
        budget = server.host.budget
        while not budget.used_bytes:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)  # it waits for the part's bytes
        waiting = []
        for number in range(10):
            waiting.append(asyncio.create_task(budget.reserve(f"other{number}", 2**16)))
            await asyncio.sleep(0)
        for reserved in await asyncio.gather(*waiting):
            reserved.release()
        idle.detach()


async def test_a_resumed_download_names_each_object_once(stubs: Stubs) -> None:
    run, _ = await create_run(stubs)
    plan = (await pull(stubs, run, "body")).plan
    request = exchange.PullFragmentRequest(run="demo", run_uid=run.uid, fragment="body", from_version=-1)
    request.resume.objects.extend([plan.objects[0].name] * 60_000)
    with refused("TOO_LARGE", EXHAUSTED):
        await stubs.exchange.PullFragment(request).read()
    del request.resume.objects[15_000:]
    with refused("BAD_REQUEST", grpc.StatusCode.INVALID_ARGUMENT):
        await stubs.exchange.PullFragment(request).read()


async def test_the_first_weights_of_a_run_are_the_learner_s_that_created_it() -> None:
    async with serving(DictObjects(), LOCAL) as server:
        weights = {"w": np.ones((30, 30), np.float32)}
        target = f"127.0.0.1:{server.port}"

        def create() -> None:
            with ArrayLearner(weights, target=target, run="mine", learner_id="us-east", create=True):
                pass

        await asyncio.to_thread(create)
        state = (await server.host.open("mine")).state
        creators = {one.item.learner for one in state.deltas.values() if one.item.base_version == INITIAL_BASE}
        assert creators == {"us-east"}


def test_what_many_small_parts_take_of_memory_is_bounded_and_given_back() -> None:
    clock = StillClock()
    parts = orphans(clock, 0)
    for count in range(2**18):  # parts of 1 byte, each of a delta of its own
        parts.check("a", 1)
        parts.stored("a", str(count), 1)
    with pytest.raises(SyncerError, match="complete them"):
        parts.check("a", 1)
    clock.now_s += 90_000
    parts.stored("b", "other", 1)
    assert len(parts._known) == 1
    parts.check("a", 2**30)


def test_small_parts_of_accepted_deltas_leave_nothing() -> None:
    parts = orphans(SystemClock(), 0)
    for name in ("one", "other"):
        for _ in range(3):
            parts.stored("a", name, 100)
        parts.finished(name, [100, 100, 100])
    assert not parts._known


async def test_refusals_of_an_address_beyond_its_rate_are_told_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "_BURST", 3)
    monkeypatch.setattr(refusals, "_HELD_S", 0.2)
    held = Refusals()

    async def told_after_s(address: str) -> float:
        CALLER.set(Caller(peer=f"{address}:1"))
        begun_s = time.monotonic()
        await held.hold_back()
        return time.monotonic() - begun_s

    first = [await asyncio.create_task(told_after_s("ipv4:10.0.0.1")) for _ in range(4)]
    other = await asyncio.create_task(told_after_s("ipv4:10.0.0.2"))
    assert first[3] >= 0.2 > max(*first[:3], other)


async def test_short_calls_of_a_client_come_at_a_rate_and_those_of_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(interceptor, "SHORT_CALLS_A_SECOND", 10.0)
    monkeypatch.setattr(interceptor, "SHORT_CALLS_BURST_S", 1.0)
    async with serving(DictObjects(), LOCAL) as server, connected(server.port) as one, connected(server.port) as other:
        await create_run(one)
        begun_s = time.monotonic()
        many = [asyncio.ensure_future(one.runs.GetRun(runs.GetRunRequest(name="demo"))) for _ in range(30)]
        await asyncio.sleep(0.1)
        async with asyncio.timeout(1):
            await other.runs.GetRun(runs.GetRunRequest(name="demo"))
        assert sum(call.done() for call in many) < 12
        await asyncio.gather(*many)
        assert time.monotonic() - begun_s > 1.8  # ten at once, twenty at the rate


async def test_a_long_answer_counts_as_several_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interceptor, "LEAST_MESSAGE_BYTES", 100)
    monkeypatch.setattr(interceptor, "MESSAGE_BYTES", 10)
    monkeypatch.setattr(interceptor, "SHORT_CALLS_BURST_S", 0.2)
    async with serving(DictObjects(), LOCAL) as server, connected(server.port) as stubs:
        run, _ = await create_run(stubs)
        begun_s = time.monotonic()
        for _ in range(4):
            await stubs.runs.GetRun(runs.GetRunRequest(name="demo"))
        paid_s = run.ByteSize() / 10 / quotas.SHORT_CALLS_A_SECOND
        assert time.monotonic() - begun_s > 3 * paid_s - 0.2 > 0


async def test_a_tensor_has_few_dimensions(stubs: Stubs) -> None:
    fragments = [types.Fragment(name="all", tensors=["w"])]
    for shape in ([127] * 200_000, [2**62] * 300):  # their product takes seconds, or can't be written down
        tensors = [types.Tensor(name="w", shape=shape, dtype="float32")]
        untrained = [types.UntrainedTensor(name="u", shape=shape, dtype="float32")]
        for given in ({"tensors": tensors}, {"tensors": [types.Tensor(name="w", shape=[1])], "untrained": untrained}):
            with refused("SHAPE_MISMATCH", INVALID):
                await stubs.runs.CreateRun(
                    runs.CreateRunRequest(request_id="0" * 32, name="wide", fragments=fragments, **given)
                )


async def test_a_policy_has_few_pins_and_merge_rules(stubs: Stubs) -> None:
    request = runs.CreateRunRequest(
        request_id="0" * 32,
        name="pinned",
        tensors=[types.Tensor(name="w", shape=[1])],
        fragments=[types.Fragment(name="all", tensors=["w"])],
    )
    request.policy.pinned_positions.extend(range(1, 1002))
    with refused("BAD_REQUEST", INVALID):
        await stubs.runs.CreateRun(request)
    request.policy.Clear()
    for number in range(1001):
        request.policy.merge_by_fragment[str(number)] = types.MERGE_RULE_MEAN
    with refused("BAD_REQUEST", INVALID):
        await stubs.runs.CreateRun(request)


async def test_a_report_names_as_many_fragments_as_there_are(stubs: Stubs) -> None:
    run, _ = await create_run(stubs)
    learner = RawLearner(stubs, run, "us", random.Random(1))
    await learner.attach()
    assert learner.call is not None
    report = types.LearnerReport(adopted=[types.FragmentVersion()] * 500_000)
    await learner.call.write(exchange.AttachRequest(report=report))
    with refused("BAD_REQUEST", INVALID):
        while await learner.call.read():
            pass


async def test_a_resumed_download_names_few_objects(stubs: Stubs) -> None:
    await create_run(stubs)
    request = exchange.PullFragmentRequest(run="demo", fragment="body", from_version=-1)
    request.resume.objects.extend([""] * 20_001)
    with refused("BAD_REQUEST", INVALID):
        await stubs.exchange.PullFragment(request).read()


async def test_health_reads_no_long_messages(stubs: Stubs) -> None:
    with refused("TOO_LARGE", EXHAUSTED):
        await health_pb2_grpc.HealthStub(stubs.channel).Check(health_pb2.HealthCheckRequest(service="s" * 5000))


def test_a_stored_part_has_the_norms_of_its_own_tensors() -> None:
    ref = ObjectRef("name", 0, 2, 3, "0" * 64)
    parts = [StoredPart.of(ref, norms) for norms in ([0.0, 0.0, 0.5, 0.0, 1.5, 0.0], [0.25, 0.0, 1.0, 0.0, 0.0, 0.0])]
    assert [(part.first_tensor, part.squared_norms) for part in parts] == [(2, (0.5, 0.0, 1.5)), (0, (0.25, 0.0, 1.0))]
    assert summed_norms(parts, 6) == (0.25, 0.0, 1.5, 0.0, 1.5, 0.0)
    assert StoredPart.of(ref, np.zeros(100_000)).squared_norms == ()


def test_failures_leave_few_lines() -> None:
    clock = StillClock()
    lines = quotas.Rate("failures", clock, burst=3, pause_s=1.0)
    assert [lines.is_due("Runs/GetRun") for _ in range(5)] == [True, True, True, False, False]
    clock.now_s += 1
    assert [lines.is_due("Runs/GetRun") for _ in range(2)] == [True, False]


async def test_a_draft_is_not_followed(stubs: Stubs) -> None:
    uid = (
        await stubs.runs.CreateRun(
            runs.CreateRunRequest(
                request_id="0" * 32,
                name="draft",
                tensors=[types.Tensor(name="w", shape=[1])],
                fragments=[types.Fragment(name="all", tensors=["w"])],
            )
        )
    ).run.uid
    with refused("RUN_DRAFT", grpc.StatusCode.FAILED_PRECONDITION):
        await stubs.exchange.Watch(exchange.WatchRequest(run="draft", run_uid=uid)).read()
