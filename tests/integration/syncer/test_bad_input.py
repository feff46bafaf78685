"""What a syncer refuses, with which status and reason, and that a refusal loses nothing."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, Final

import grpc
from google.protobuf.duration_pb2 import Duration

from skerry.v1 import capabilities_pb2
from skerry.v1 import exchange_pb2 as exchange
from skerry.v1 import runs_pb2 as runs
from skerry.v1 import types_pb2 as types
from tests.support.heard_logs import heard_logs
from tests.support.raw_learner import (
    Stubs,
    attached,
    create_run,
    delta_values,
    plan_messages,
    pull,
    refusal_of,
    refused,
)

NOT_FOUND = grpc.StatusCode.NOT_FOUND
INVALID = grpc.StatusCode.INVALID_ARGUMENT
PRECONDITION = grpc.StatusCode.FAILED_PRECONDITION
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED

UID: Final = "0" * 32
FAR: Final = 2**62


def create(**changes: Any) -> runs.CreateRunRequest:
    tensors, fragments = plan_messages()
    plan: dict[str, Any] = {"tensors": tensors, "fragments": fragments}
    return runs.CreateRunRequest(**{"request_id": "7" * 32, "name": "new"} | plan | changes)


def set_policy(**fields: Any) -> runs.SetPolicyRequest:
    return runs.SetPolicyRequest(request_id="6" * 32, name="demo", policy=types.Policy(**fields))


def hello(**fields: Any) -> exchange.AttachRequest:
    plan: dict[str, Any] = {"tensors": plan_messages()[0]}
    names = {"run": "demo", "learner_id": "eu", "session_id": UID}
    return exchange.AttachRequest(hello=exchange.Hello(**plan | names | fields))


def pull_of(**fields: Any) -> exchange.PullFragmentRequest:
    return exchange.PullFragmentRequest(**({"run": "demo", "fragment": "body"} | fields))


def roll_back(position: int) -> runs.RollBackRequest:
    return runs.RollBackRequest(name="demo", request_id=UID, target_position=position)


REPEATED: Final = [types.Fragment(name="body", tensors=["weight", "weight"])]
CALLS: Final[list[tuple[str, grpc.StatusCode, Any]]] = [
    ("RUN_NOT_FOUND", NOT_FOUND, runs.GetRunRequest(name="nowhere")),
    ("RUN_NOT_FOUND", NOT_FOUND, runs.CommitRunRequest(name="nowhere", run_uid=UID)),
    ("RUN_NOT_FOUND", NOT_FOUND, runs.DeleteRunRequest(name="nowhere", run_uid=UID)),
    ("RUN_NOT_FOUND", NOT_FOUND, hello(run="nowhere")),
    ("RUN_NOT_FOUND", NOT_FOUND, exchange.WatchRequest(run="nowhere")),
    *(("BAD_NAME", INVALID, create(name=name)) for name in ("../other", "/etc", "..", "", "UPPER", "x" * 65, "a\x00b")),
    ("BAD_NAME", INVALID, runs.GetRunRequest(name="../other")),
    ("BAD_NAME", INVALID, pull_of(run="../other")),
    ("BAD_NAME", INVALID, hello(session_id="../x")),
    ("SHAPE_MISMATCH", INVALID, hello(tensors=[types.Tensor(name="weight", shape=[41, 30])])),
    ("SHAPE_MISMATCH", INVALID, create(fragments=REPEATED)),
    ("SHAPE_MISMATCH", INVALID, create(untrained=[types.UntrainedTensor(name="base", shape=[-1])])),
    ("SHAPE_MISMATCH", INVALID, create(untrained=[types.UntrainedTensor(name="head.weight")])),  # which is trained
    ("TOO_LARGE", EXHAUSTED, create(tensors=[types.Tensor(name="x" * 3500)] * 1000)),
    ("BAD_REQUEST", INVALID, create(policy=types.Policy(quorum_count=-1))),
    ("BAD_REQUEST", INVALID, set_policy(lease_term=Duration(seconds=2**40))),
    ("BAD_REQUEST", INVALID, set_policy(merge_by_fragment={"elsewhere": types.MERGE_RULE_MEAN})),
    ("BAD_REQUEST", INVALID, pull_of(from_version=-(2**63), is_newest=True, resume=exchange.PullResume())),
    ("BAD_REQUEST", INVALID, pull_of(from_version=-1, target_version=-1)),
    ("VERSION_NOT_FOUND", NOT_FOUND, pull_of(target_version=FAR)),
    ("VERSION_NOT_FOUND", NOT_FOUND, pull_of(from_version=FAR, is_newest=True)),
    ("STORE_ROLLED_BACK", grpc.StatusCode.DATA_LOSS, exchange.WatchRequest(run="demo", after_position=FAR)),
    *(("VERSION_NOT_FOUND", NOT_FOUND, roll_back(position)) for position in (0, 1, FAR)),
    ("STORE_ROLLED_BACK", grpc.StatusCode.DATA_LOSS, runs.GetRunRequest(name="demo", seen_position=FAR)),
    ("FRAGMENT_NOT_FOUND", NOT_FOUND, runs.ListVersionsRequest(name="demo", fragment="tail")),
]
HEADERS: Final[list[tuple[str, grpc.StatusCode, dict[str, Any]]]] = [
    *(("BAD_NAME", INVALID, {field: "../x"}) for field in ("learner_id", "session_id", "delta_id", "run_uid")),
    ("RUN_NOT_FOUND", NOT_FOUND, {"run": "nowhere"}),
    ("RUN_REPLACED", PRECONDITION, {"run_uid": UID}),
    ("BAD_REQUEST", INVALID, {"base_digest": bytes(500_000)}),
    ("BASE_FOREIGN", PRECONDITION, {"base_digest": bytes(32)}),
    ("SESSION_UNKNOWN", PRECONDITION, {"session_id": UID}),
]


def call(stubs: Stubs, request: Any) -> Awaitable[object]:
    """Returns the first answer to a request, by the method whose request it is."""
    name = type(request).__name__.removesuffix("Request")
    method = getattr(stubs.exchange if hasattr(stubs.exchange, name) else stubs.runs, name)
    answer = method(iter([request]) if name in {"Attach", "PushDelta"} else request)
    return answer.read() if hasattr(answer, "read") else answer  # type: ignore[no-any-return]  # of any method


async def refusal(answer: Awaitable[object]) -> tuple[str, grpc.StatusCode]:
    """Returns the reason and the status with which a call is refused."""
    try:
        await answer
    except grpc.aio.AioRpcError as error:
        return refusal_of(error).reason, error.code()
    return "", grpc.StatusCode.OK


async def test_a_request_that_is_wrong_is_refused_with_its_reason_and_harms_nothing(stubs: Stubs) -> None:
    run, _ = await create_run(stubs)
    learner = await attached(stubs, run)
    header = learner.header(await pull(stubs, run, "body"), "body")
    pushes = []
    for reason, status, changes in HEADERS:
        push = exchange.PushDeltaRequest(header=header)
        for field, value in changes.items():
            setattr(push.header, field, value)
        pushes.append((reason, status, push))
    with heard_logs() as lines:
        for reason, status, request in (*CALLS, *pushes):
            assert (request, await refusal(call(stubs, request))) == (request, (reason, status))
    assert not [line for line in lines if line.get("exc_info")]
    await learner.push(header, delta_values())
    committed = (await learner.event("version_committed")).version_committed
    assert ([delta.delta_id for delta in committed.merged], committed.version.version) == ([header.delta_id], 1)


async def test_a_message_of_the_limit_is_taken_and_a_larger_one_refused_with_details(stubs: Stubs) -> None:
    answer = await stubs.capabilities.GetCapabilities(capabilities_pb2.GetCapabilitiesRequest())
    limit = answer.max_message_size_bytes
    await create_run(stubs)

    def padded(size_bytes: int) -> runs.GetRunRequest:
        """Returns a request that is made that large by a field that it does not have."""
        request = runs.GetRunRequest(name="demo")
        padding = runs.CreateRunRequest(packed_layout=bytes(size_bytes - request.ByteSize() - 5))
        request.MergeFromString(padding.SerializeToString())
        assert request.ByteSize() == size_bytes
        return request

    assert (await stubs.runs.GetRun(padded(limit))).run.name == "demo"
    with refused("TOO_LARGE", EXHAUSTED) as caught:
        await stubs.runs.GetRun(padded(limit + 1))
    assert str(limit) in caught[0].message
