"""What a syncer answers where the contract leaves a client to find out."""

from __future__ import annotations

import pytest
from grpc_reflection.v1alpha import reflection_pb2

from skerry.v1 import exchange_pb2 as exchange
from skerry.v1 import types_pb2 as types
from skerry.wire.frames import parse_frames
from tests.support.raw_learner import Stubs, attached, create_run, pull


async def test_an_answer_says_what_becomes_of_a_vector_codec_that_has_no_effect(stubs: Stubs) -> None:
    plain = types.Encoding(codec=types.CODEC_FLOAT32, vector_codec=types.CODEC_INT8, compressor=types.COMPRESSOR_NONE)
    policy = types.Policy(inner_step_count=4, grace_factor=0.0, delta_encoding=plain, update_encoding=plain)
    run, _ = await create_run(stubs, policy=policy)
    for answered in (run.policy.delta_encoding, run.policy.update_encoding):
        assert answered.codec == answered.vector_codec == types.CODEC_FLOAT32
    await (await attached(stubs, run)).advance()
    request = exchange.PullFragmentRequest(run="demo", fragment="body", from_version=0, is_newest=True)
    data = b"".join([answer.data.data async for answer in stubs.exchange.PullFragment(request)])
    assert {frame.codec for frame in parse_frames(data)} == {"float32"}


async def test_a_version_above_the_target_leads_to_it_from_a_snapshot(stubs: Stubs) -> None:
    run, _ = await create_run(stubs)
    await (await attached(stubs, run)).advance()
    newest = await pull(stubs, run, "body")
    older = await pull(stubs, run, "body", base=newest, target=0)
    assert (newest.version, older.version, older.plan.from_version) == (1, 0, -1)


@pytest.mark.parametrize("package", ["grpc.reflection.v1", "grpc.reflection.v1alpha"])
async def test_reflection_describes_every_service_under_both_of_its_names(stubs: Stubs, package: str) -> None:
    method = stubs.channel.stream_stream(
        f"/{package}.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )

    async def ask(**question: str) -> reflection_pb2.ServerReflectionResponse:
        (answer,) = [answer async for answer in method(iter([reflection_pb2.ServerReflectionRequest(**question)]))]
        return answer

    names = {service.name for service in (await ask(list_services="")).list_services_response.service}
    own = {"skerry.v1.Capabilities", "skerry.v1.Exchange", "skerry.v1.Runs"}
    reflections = {"grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection"}
    assert names == {*own, *reflections, "grpc.health.v1.Health"}
    for name in (*names, "google.rpc.Status", "google.rpc.ErrorInfo", "google.rpc.RetryInfo"):
        described = await ask(file_containing_symbol=name)
        assert described.file_descriptor_response.file_descriptor_proto, name
