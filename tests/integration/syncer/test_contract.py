"""What the contract says of requests that are wrong, and what a syncer answers: the same, over real sockets."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence
from typing import TypeVar

import grpc
import numpy as np
import pytest
from google.protobuf.message import Message
from grpc_reflection.v1alpha import reflection_pb2

from skerry.v1 import capabilities_pb2
from skerry.v1 import exchange_pb2 as exchange
from skerry.v1 import runs_pb2 as runs
from skerry.v1 import types_pb2 as types
from skerry.wire.frames import Frame, parse_frames
from tests.support.raw_learner import (
    FLOAT32,
    Float32s,
    Pulled,
    RawLearner,
    Stubs,
    create_run,
    layout,
    pull,
    push_messages,
    refused,
    send,
)

INVALID = grpc.StatusCode.INVALID_ARGUMENT
NOT_FOUND = grpc.StatusCode.NOT_FOUND
PRECONDITION = grpc.StatusCode.FAILED_PRECONDITION
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED

BODY = layout("body")
M = TypeVar("M", bound=Message)


@pytest.fixture
async def learner(stubs: Stubs) -> AsyncIterator[RawLearner]:
    run, _ = await create_run(stubs)
    attached = RawLearner(stubs, run, "stranger", random.Random(11))
    await attached.attach()
    yield attached
    attached.detach()


@pytest.fixture
async def base(learner: RawLearner) -> Pulled:
    return await pull(learner.stubs, learner.run, "body")


def _values() -> Float32s:
    return np.random.default_rng(3).standard_normal(BODY.numel).astype(np.float32)


def _push(
    learner: RawLearner, base: Pulled, parts: Sequence[tuple[int, int]]
) -> tuple[exchange.PushHeader, list[exchange.PushDeltaRequest]]:
    header = learner.header(base, "body")
    return header, push_messages(header, _values(), FLOAT32, parts=((0, BODY.numel),))[:1] + [
        message
        for first, numel in parts
        for message in push_messages(header, _values(), FLOAT32, parts=((first, numel),))[1:-1]
    ]


COMPLETE = exchange.PushDeltaRequest(complete=exchange.PushComplete(digest=bytes(32)))


async def test_parts_that_overlap_are_out_of_range(learner: RawLearner, base: Pulled) -> None:
    _, messages = _push(learner, base, ((0, 800), (640, BODY.numel - 640)))
    with refused("OUT_OF_RANGE", INVALID):
        await send(learner.stubs, [*messages, COMPLETE])


async def test_parts_that_overlap_those_of_an_earlier_call_are_out_of_range(learner: RawLearner, base: Pulled) -> None:
    header, messages = _push(learner, base, ((0, 800),))
    assert (await send(learner.stubs, messages)).state == exchange.PUSH_STATE_PARTS_STORED
    rest = push_messages(header, _values(), FLOAT32, parts=((640, BODY.numel - 640),))
    with refused("OUT_OF_RANGE", INVALID):
        await send(learner.stubs, [*rest[:-1], COMPLETE])
    # Parts of one call that cover the fragment are enough by themselves.
    whole = push_messages(header, _values(), FLOAT32, parts=((0, 640), (640, BODY.numel - 640)))
    assert (await send(learner.stubs, whole)).state == exchange.PUSH_STATE_ACCEPTED


async def test_parts_that_leave_a_gap_are_incomplete(learner: RawLearner, base: Pulled) -> None:
    _, messages = _push(learner, base, ((0, 400), (640, BODY.numel - 640)))
    with refused("INCOMPLETE", PRECONDITION):
        await send(learner.stubs, [*messages, COMPLETE])


async def test_an_answer_says_what_becomes_of_a_vector_codec_that_has_no_effect(stubs: Stubs) -> None:
    plain = types.Encoding(codec=types.CODEC_FLOAT32, vector_codec=types.CODEC_INT8, compressor=types.COMPRESSOR_NONE)
    policy = types.Policy(inner_step_count=4, grace_factor=0.0, delta_encoding=plain, update_encoding=plain)
    run, _ = await create_run(stubs, policy=policy)
    for answered in (run.policy.delta_encoding, run.policy.update_encoding):
        assert answered.codec == answered.vector_codec == types.CODEC_FLOAT32
    learner = RawLearner(stubs, run, "stranger", random.Random(11))
    await learner.attach()
    base = await pull(stubs, run, "body")
    await learner.push(learner.header(base, "body"), _values())
    await learner.event("version_committed")
    codecs = {frame.codec async for frame in _update_frames(learner, base)}
    assert codecs == {"float32"}
    learner.detach()


async def _update_frames(learner: RawLearner, base: Pulled) -> AsyncIterator[Frame]:
    request = exchange.PullFragmentRequest(
        run=learner.run.name, run_uid=learner.run.uid, fragment="body", from_version=base.version, is_newest=True
    )
    data = b"".join([response.data.data async for response in learner.stubs.exchange.PullFragment(request)])
    for frame in parse_frames(data):
        yield frame


async def test_a_codec_that_is_not_known_is_refused_where_it_has_no_effect_too(learner: RawLearner) -> None:
    odd = types.Encoding(codec=types.CODEC_FLOAT32)
    odd.MergeFromString(b"\x18\x63")  # vector_codec = 99
    change = runs.SetPolicyRequest(request_id="1" * 32, name="demo", policy=types.Policy(delta_encoding=odd))
    with refused("BAD_REQUEST", INVALID):
        await learner.stubs.runs.SetPolicy(change)


async def test_more_steps_than_the_learner_has_taken_are_refused(learner: RawLearner, base: Pulled) -> None:
    header = learner.header(base, "body")
    header.last_step = header.step_count - 1
    with refused("BAD_REQUEST", INVALID) as caught:
        await learner.push(header, _values())
    assert caught.refusal.message.startswith("step_count")
    header.last_step = header.step_count
    assert (await learner.push(header, _values())).state == exchange.PUSH_STATE_ACCEPTED


def _pull_from(learner: RawLearner, from_version: int, **changes: object) -> exchange.PullFragmentRequest:
    request = exchange.PullFragmentRequest(
        run=learner.run.name, run_uid=learner.run.uid, fragment="body", from_version=from_version, is_newest=True
    )
    for name, value in changes.items():
        setattr(request, name, value)
    return request


async def _pulled(stubs: Stubs, request: exchange.PullFragmentRequest) -> exchange.PullPlan:
    async for response in stubs.exchange.PullFragment(request):
        return response.plan
    raise AssertionError("no plan came")


@pytest.mark.parametrize("version", [-2, -(2**63)])
@pytest.mark.parametrize("resume", [None, exchange.PullResume()], ids=["anew", "resumed"])
async def test_a_version_that_can_not_be_is_refused(
    learner: RawLearner, version: int, resume: exchange.PullResume | None
) -> None:
    request = _pull_from(learner, version)
    if resume is not None:
        request.resume.CopyFrom(resume)
    with refused("BAD_REQUEST", INVALID) as caught:
        await _pulled(learner.stubs, request)
    assert caught.refusal.message.startswith("from_version")
    with refused("BAD_REQUEST", INVALID):
        await _pulled(learner.stubs, _pull_from(learner, -1, target_version=-1, is_newest=False))


async def test_a_version_above_the_target_leads_to_it_from_a_snapshot(learner: RawLearner, base: Pulled) -> None:
    await learner.push(learner.header(base, "body"), _values())
    await learner.event("version_committed")
    plan = await _pulled(learner.stubs, _pull_from(learner, 1, target_version=0, is_newest=False))
    assert (plan.from_version, plan.target.version) == (-1, 0)


async def _limit(stubs: Stubs) -> int:
    return (await stubs.capabilities.GetCapabilities(capabilities_pb2.GetCapabilitiesRequest())).max_message_size_bytes


def _padded(request: M, size_bytes: int) -> M:
    """Returns the request with an unknown field that makes it that large."""
    request.MergeFromString(_unknown_field(size_bytes - request.ByteSize()))
    assert request.ByteSize() == size_bytes
    return request


def _unknown_field(size_bytes: int) -> bytes:
    value_size = size_bytes - 6  # two bytes of tag, four of length
    length = bytes(
        [value_size & 127 | 128, value_size >> 7 & 127 | 128, value_size >> 14 & 127 | 128, value_size >> 21]
    )
    return b"\xfa\x7f" + length + bytes(value_size)


async def test_a_message_of_the_limit_is_taken_and_a_larger_one_refused_with_details(learner: RawLearner) -> None:
    limit = await _limit(learner.stubs)
    answer = await learner.stubs.runs.GetRun(_padded(runs.GetRunRequest(name="demo"), limit))
    assert answer.run.name == "demo"
    with refused("TOO_LARGE", EXHAUSTED) as caught:
        await learner.stubs.runs.GetRun(_padded(runs.GetRunRequest(name="demo"), limit + 1))
    assert str(limit) in caught.refusal.message


async def test_a_message_of_a_stream_that_is_over_the_limit_is_refused_with_details(
    learner: RawLearner, base: Pulled
) -> None:
    header, messages = _push(learner, base, ((0, BODY.numel),))
    large = exchange.PushDeltaRequest(data=bytes(await _limit(learner.stubs)))
    with refused("TOO_LARGE", EXHAUSTED):
        await send(learner.stubs, [*messages[:2], large])
    answer = await learner.push(header, _values())
    assert answer.state == exchange.PUSH_STATE_ACCEPTED


async def test_a_report_that_is_over_the_limit_ends_its_stream_with_details(learner: RawLearner) -> None:
    assert learner.call is not None
    large = types.LearnerReport(step_count=1)
    large.adopted.add(fragment="body", digest=bytes(await _limit(learner.stubs)))
    with refused("TOO_LARGE", EXHAUSTED):
        await learner.call.write(exchange.AttachRequest(report=large))
        await learner.event("draining")


@pytest.mark.parametrize("package", ["grpc.reflection.v1", "grpc.reflection.v1alpha"])
async def test_reflection_describes_every_service_under_both_of_its_names(stubs: Stubs, package: str) -> None:
    method = stubs.channel.stream_stream(
        f"/{package}.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )

    async def ask(**question: str) -> reflection_pb2.ServerReflectionResponse:
        answers = [answer async for answer in method(iter([reflection_pb2.ServerReflectionRequest(**question)]))]
        return answers[0]

    names = {service.name for service in (await ask(list_services="")).list_services_response.service}
    own = {"skerry.v1.Capabilities", "skerry.v1.Exchange", "skerry.v1.Runs"}
    reflections = {"grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection"}
    assert names == {*own, *reflections, "grpc.health.v1.Health"}
    for name in (*names, "google.rpc.Status", "google.rpc.ErrorInfo", "google.rpc.RetryInfo"):
        described = await ask(file_containing_symbol=name)
        assert described.file_descriptor_response.file_descriptor_proto, name
