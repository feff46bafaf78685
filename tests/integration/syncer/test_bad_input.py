"""What a syncer refuses, with which status and reason, and that a refusal loses nothing."""

from __future__ import annotations

import tracemalloc
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, Final

import grpc
import numpy as np
import pytest
from google.protobuf.duration_pb2 import Duration

from skerry.runtime.clock import SystemClock
from skerry.v1 import capabilities_pb2
from skerry.v1 import exchange_pb2 as exchange
from skerry.v1 import runs_pb2 as runs
from skerry.v1 import types_pb2 as types
from skerry_syncer.server import serving
from skerry_syncer.store.errors import StoreError, StoreFullError, StoreUnavailableError
from skerry_syncer.store.log import run_log as log
from skerry_syncer.store.objects.opening import open_objects
from tests.integration.syncer.conftest import LOCAL
from tests.support import forgery
from tests.support.faulty_objects import NO_FAULT, Effect, Fault, FaultyObjects, LateWrites
from tests.support.heard_logs import heard_logs
from tests.support.raw_learner import (
    FLOAT32,
    INT4,
    Pulled,
    RawLearner,
    Stubs,
    attached,
    connected,
    create_run,
    delta_values,
    layout,
    part_messages,
    plan_messages,
    pull,
    push_messages,
    refusal_of,
    refused,
    send,
)

NOT_FOUND = grpc.StatusCode.NOT_FOUND
INVALID = grpc.StatusCode.INVALID_ARGUMENT
PRECONDITION = grpc.StatusCode.FAILED_PRECONDITION
EXISTS = grpc.StatusCode.ALREADY_EXISTS
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED

NUMEL: Final = layout("body").numel
UID: Final = "0" * 32
FAR: Final = 2**62
Push = Sequence[exchange.PushDeltaRequest]


class Trial:
    """An attached learner with the newest `body`."""

    def __init__(self, stubs: Stubs, run: types.Run, learner: RawLearner, base: Pulled) -> None:
        self.stubs, self.run, self.learner, self.base = stubs, run, learner, base

    def header(self, **changes: object) -> exchange.PushHeader:
        header = self.learner.header(self.base, "body")
        for name, value in changes.items():
            setattr(header, name, value)
        return header

    def forged(self, data: bytes, *, first: int = 0, numel: int = NUMEL) -> Push:
        """Returns a push of one part with these bytes."""
        return forgery.messages(self.header(), data, first=first, numel=numel)

    def parts(self, *parts: tuple[int, int]) -> Push:
        """Returns a push of these parts, with a wrong digest over all of them."""
        messages = [exchange.PushDeltaRequest(header=self.header())]
        for part in parts:
            messages += part_messages(delta_values(), layout("body"), FLOAT32, *part)[0]
        return [*messages, exchange.PushDeltaRequest(complete=exchange.PushComplete(digest=bytes(32)))]

    async def still_merges(self) -> None:
        """Asserts that an honest delta from the same base is accepted and merged, and nothing else ever was."""
        header = self.header()
        answer = await self.learner.push(header, delta_values())
        assert answer.state == exchange.PUSH_STATE_ACCEPTED
        committed = (await self.learner.event("version_committed")).version_committed
        assert [delta.delta_id for delta in committed.merged] == [header.delta_id]
        assert committed.version.version == self.base.version + 1


@pytest.fixture
async def trial(stubs: Stubs) -> Trial:
    run, _ = await create_run(stubs)
    return Trial(stubs, run, await attached(stubs, run), await pull(stubs, run, "body"))


async def outcome(call: Awaitable[object]) -> tuple[str, grpc.StatusCode]:
    """Returns the reason and the status with which a call is refused."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        refusal = refusal_of(error)
        return refusal.reason, refusal.code
    return "", grpc.StatusCode.OK


def _corrupt() -> bytes:
    data = forgery.float32_frame(delta_values())
    return data[:200] + bytes([data[200] ^ 1]) + data[201:]


def _large(trial: Trial) -> Push:
    return [*trial.parts((0, NUMEL))[:2], exchange.PushDeltaRequest(data=bytes(4 * 2**20))]


PUSHES: Final[dict[str, tuple[str, grpc.StatusCode, Callable[[Trial], Push]]]] = {
    "not finite": ("NON_FINITE", INVALID, lambda t: t.forged(forgery.float32_frame(np.full(NUMEL, np.nan, "<f4")))),
    "corrupt": ("BAD_FRAME", INVALID, lambda t: t.forged(_corrupt())),
    "past the end": ("OUT_OF_RANGE", INVALID, lambda t: t.forged(b"", numel=NUMEL + 1)),
    "far beyond": ("OUT_OF_RANGE", INVALID, lambda t: t.forged(b"", first=FAR, numel=FAR)),
    "too long": ("OUT_OF_RANGE", INVALID, lambda t: t.forged(forgery.float32_frame(np.zeros(NUMEL + 8, "<f4")))),
    "twice": ("OUT_OF_RANGE", INVALID, lambda t: t.forged(forgery.float32_frame(delta_values()) * 2)),
    "overlap": ("OUT_OF_RANGE", INVALID, lambda t: t.parts((0, 800), (640, NUMEL - 640))),
    "gap": ("INCOMPLETE", PRECONDITION, lambda t: t.parts((0, 400), (640, NUMEL - 640))),
    "part's digest": ("DIGEST_MISMATCH", INVALID, lambda t: t.forged(forgery.float32_frame(delta_values()))),
    "delta's digest": ("DIGEST_MISMATCH", INVALID, lambda t: t.parts((0, NUMEL))),
    "block": ("ENCODING_UNSUPPORTED", INVALID, lambda t: t.forged(forgery.int4_frame_with_scale(1.0, 1200, block=8))),
    "message's size": ("TOO_LARGE", EXHAUSTED, _large),
}
HEADERS: Final[list[tuple[str, grpc.StatusCode, dict[str, Any]]]] = [
    ("BAD_REQUEST", INVALID, {"step_count": 2**53 + 1}),
    ("BAD_REQUEST", INVALID, {"last_step": 1}),  # less than the steps of the delta
    ("BAD_REQUEST", INVALID, {"token_count": 2**53 + 1}),
    ("BAD_REQUEST", INVALID, {"token_count": 0}),
    ("BAD_REQUEST", INVALID, {"base_digest": bytes(500_000)}),
    ("BASE_FUTURE", PRECONDITION, {"base_version": 3}),
    ("BASE_FOREIGN", PRECONDITION, {"base_digest": bytes(32)}),
    ("SESSION_UNKNOWN", PRECONDITION, {"session_id": "2" * 32}),
    ("FRAGMENT_NOT_FOUND", NOT_FOUND, {"fragment": "../body"}),
]


async def test_a_push_that_is_wrong_is_refused_with_its_reason_and_harms_nothing(trial: Trial) -> None:
    found = {name: await outcome(send(trial.stubs, messages(trial))) for name, (_, _, messages) in PUSHES.items()}
    assert found == {name: (reason, status) for name, (reason, status, _) in PUSHES.items()}
    paths = [("BAD_NAME", INVALID, {field: "../x"}) for field in ("learner_id", "session_id", "delta_id", "run_uid")]
    for reason, status, changes in (*HEADERS, *paths):
        push = [exchange.PushDeltaRequest(header=trial.header(**changes))]
        assert (changes, await outcome(send(trial.stubs, push))) == (changes, (reason, status))
    await trial.still_merges()


def create(**changes: Any) -> runs.CreateRunRequest:
    tensors, fragments = plan_messages()
    request: Any = runs.CreateRunRequest(request_id="7" * 32, name="new", tensors=tensors, fragments=fragments)
    for name, value in changes.items():
        request.ClearField(name)
        request.MergeFrom(runs.CreateRunRequest(**{name: value}))
    return request  # type: ignore[no-any-return]  # of any field


def set_policy(policy: types.Policy) -> runs.SetPolicyRequest:
    return runs.SetPolicyRequest(request_id="6" * 32, name="demo", policy=policy)


def hello(run: str, **changes: Any) -> exchange.AttachRequest:
    greeting = exchange.Hello(run=run, learner_id="eu", session_id=UID, tensors=plan_messages()[0])
    if changes:
        greeting.tensors[0].CopyFrom(types.Tensor(**({"name": "weight", "shape": [40, 30]} | changes)))
    return exchange.AttachRequest(hello=greeting)


def pull_of(**fields: Any) -> exchange.PullFragmentRequest:
    return exchange.PullFragmentRequest(**({"run": "demo", "fragment": "body"} | fields))


def _unknown_codec() -> types.Encoding:
    encoding = types.Encoding(codec=types.CODEC_FLOAT32)
    encoding.MergeFromString(b"\x18\x63")  # vector_codec = 99, where none has an effect
    return encoding


POLICIES: Final = [
    types.Policy(delta_encoding=types.Encoding(codec=types.CODEC_INT4, block=7)),
    types.Policy(delta_encoding=_unknown_codec()),
    types.Policy(lease_term=Duration(seconds=2**40)),
    types.Policy(merge_by_fragment={"elsewhere": types.MERGE_RULE_MEAN}),
    types.Policy(quorum_count=-1),
]
UNTRAINED: Final[list[dict[str, Any]]] = [
    {"name": ""},
    {"name": "x" * 513},
    {"name": "base", "shape": [-1]},
    {"name": "base", "shape": [1] * 65},
    {"name": "head.weight"},  # which is trained
]
RESUME: Final = exchange.PullResume(object_index=2**30, offset=FAR, objects=["x"])
PUSH_TO_NOWHERE: Final = exchange.PushHeader(
    run="nowhere", run_uid=UID, learner_id="eu", session_id=UID, delta_id=UID, fragment="body"
)
CALLS: Final[list[tuple[str, grpc.StatusCode, Any]]] = [
    ("RUN_NOT_FOUND", NOT_FOUND, runs.GetRunRequest(name="nowhere")),
    ("RUN_NOT_FOUND", NOT_FOUND, runs.GetRunRequest(name="nowhere", run_uid=UID)),
    ("RUN_NOT_FOUND", NOT_FOUND, runs.CommitRunRequest(name="nowhere", run_uid=UID)),
    ("RUN_NOT_FOUND", NOT_FOUND, runs.CloseRunRequest(name="nowhere")),
    ("RUN_NOT_FOUND", NOT_FOUND, runs.DeleteRunRequest(name="nowhere", run_uid=UID)),
    ("RUN_NOT_FOUND", NOT_FOUND, hello("nowhere")),
    ("RUN_NOT_FOUND", NOT_FOUND, pull_of(run="nowhere")),
    ("RUN_NOT_FOUND", NOT_FOUND, exchange.WatchRequest(run="nowhere")),
    ("RUN_NOT_FOUND", NOT_FOUND, exchange.PushDeltaRequest(header=PUSH_TO_NOWHERE)),
    *(("BAD_NAME", INVALID, create(name=name)) for name in ("../other", "/etc", "..", "", "UPPER", "x" * 65, "a\x00b")),
    ("BAD_NAME", INVALID, runs.GetRunRequest(name="../other")),
    ("BAD_NAME", INVALID, hello("../other")),
    ("BAD_NAME", INVALID, pull_of(run="../other")),
    ("SHAPE_MISMATCH", INVALID, hello("demo", name="renamed")),
    ("SHAPE_MISMATCH", INVALID, hello("demo", shape=[41, 30])),
    ("SHAPE_MISMATCH", INVALID, create(fragments=[types.Fragment(name="body", tensors=["weight", "weight"])])),
    *(("SHAPE_MISMATCH", INVALID, create(untrained=[types.UntrainedTensor(**one)])) for one in UNTRAINED),
    *(("BAD_REQUEST", INVALID, set_policy(policy)) for policy in POLICIES),
    ("BAD_REQUEST", INVALID, create(policy=POLICIES[0])),
    ("BAD_REQUEST", INVALID, runs.ListRunsRequest(page_token="../..")),
    ("BAD_REQUEST", INVALID, pull_of(from_version=-2, is_newest=True)),
    ("BAD_REQUEST", INVALID, pull_of(from_version=-(2**63), is_newest=True, resume=exchange.PullResume())),
    ("BAD_REQUEST", INVALID, pull_of(from_version=-1, target_version=-1)),
    ("VERSION_NOT_FOUND", NOT_FOUND, pull_of(target_version=FAR)),
    ("VERSION_NOT_FOUND", NOT_FOUND, pull_of(from_version=FAR, is_newest=True)),
    ("PLAN_EXPIRED", PRECONDITION, pull_of(from_version=-1, is_newest=True, resume=RESUME)),
    ("VERSION_NOT_FOUND", NOT_FOUND, exchange.WatchRequest(run="demo", after_position=FAR)),
    ("STORE_ROLLED_BACK", grpc.StatusCode.DATA_LOSS, runs.GetRunRequest(name="demo", seen_position=FAR)),
    *(
        ("VERSION_NOT_FOUND", NOT_FOUND, runs.RollBackRequest(name="demo", request_id=UID, target_position=position))
        for position in (0, 1, 999, FAR)
    ),
    ("FRAGMENT_NOT_FOUND", NOT_FOUND, runs.ListVersionsRequest(name="demo", fragment="tail")),
]


def call(stubs: Stubs, request: Any) -> Awaitable[object]:
    """Returns the first answer to a request, by the method whose request it is."""
    name = type(request).__name__.removesuffix("Request")
    method = getattr(stubs.exchange if hasattr(stubs.exchange, name) else stubs.runs, name)
    answer = method(iter([request]) if name in {"Attach", "PushDelta"} else request)
    return answer.read() if hasattr(answer, "read") else answer  # type: ignore[no-any-return]  # of any method


async def test_a_request_that_is_wrong_is_refused_with_its_reason_and_without_a_traceback(trial: Trial) -> None:
    with heard_logs() as lines:
        for reason, status, request in CALLS:
            assert (request, await outcome(call(trial.stubs, request))) == (request, (reason, status))
    assert not [line for line in lines if line.get("exc_info")]
    await trial.still_merges()


async def test_a_push_of_more_parts_than_one_entry_holds_is_refused(
    trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = tuple((first, 40) for first in range(0, NUMEL, 40))
    messages = push_messages(trial.header(), delta_values(), FLOAT32, parts=parts)
    with monkeypatch.context() as patch:
        patch.setattr(log, "MAX_APPEND_BYTES", 2_000)
        with refused("TOO_LARGE", EXHAUSTED):
            await send(trial.stubs, messages)
    await trial.still_merges()


@pytest.fixture
def traced() -> Iterator[None]:
    """Traces allocations until the server is gone: Python 3.11 can crash where tracing ends while gRPC allocates."""
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.mark.usefixtures("traced")
async def test_a_decompression_bomb_is_refused_before_it_grows(trial: Trial) -> None:
    data = forgery.bomb(NUMEL, 16 * 2**20)
    tracemalloc.reset_peak()
    before_bytes, _ = tracemalloc.get_traced_memory()
    with refused("BAD_FRAME", INVALID) as caught:
        await send(trial.stubs, trial.forged(data))
    _, peak_bytes = tracemalloc.get_traced_memory()
    assert caught.refusal.metadata["wire_reason"] == "BOMB"
    assert peak_bytes - before_bytes < 8 * 2**20
    await trial.still_merges()


async def test_parts_that_overlap_those_of_an_earlier_call_are_out_of_range(trial: Trial) -> None:
    def push(*parts: tuple[int, int]) -> Push:
        return push_messages(header, delta_values(), FLOAT32, parts=parts)

    header = trial.header()
    assert (await send(trial.stubs, push((0, 800))[:-1])).state == exchange.PUSH_STATE_PARTS_STORED
    with refused("OUT_OF_RANGE", INVALID):
        await send(trial.stubs, push((640, NUMEL - 640)))
    # Parts of one call that cover the fragment are enough by themselves.
    assert (await send(trial.stubs, push((0, 640), (640, NUMEL - 640)))).state == exchange.PUSH_STATE_ACCEPTED


async def test_a_repeated_push_is_counted_once_and_other_bytes_under_its_id_are_refused(trial: Trial) -> None:
    header = trial.header()
    answers = [await trial.learner.push(header, delta_values()) for _ in range(3)]
    assert {answer.state for answer in answers} == {exchange.PUSH_STATE_ACCEPTED}
    assert {answer.fate.delta_id for answer in answers} == {header.delta_id}
    with refused("ID_REUSED", EXISTS):
        await trial.learner.push(header, delta_values(2))
    with refused("BASE_REPEATED", EXISTS) as caught:
        await trial.learner.push(trial.header(), delta_values(2))
    assert caught.refusal.metadata["delta_id"] == header.delta_id
    await trial.learner.event("version_committed")
    fate = (await trial.learner.push(header, delta_values())).fate
    assert (fate.fate, fate.version) == (types.FATE_MERGED, 1)
    listed = await trial.stubs.runs.ListVersions(runs.ListVersionsRequest(name="demo", fragment="body"))
    assert [delta.delta_id for version in listed.versions[:-1] for delta in version.merged] == [header.delta_id]


async def test_initial_weights_of_another_creator_are_refused(stubs: Stubs) -> None:
    draft = (await stubs.runs.CreateRun(create())).run
    header = exchange.PushHeader(
        run="new", run_uid=draft.uid, learner_id="thief", session_id="4" * 32, delta_id="5" * 32, fragment="body"
    )
    header.base_version = -1
    with refused("SESSION_UNKNOWN", PRECONDITION):
        await send(stubs, push_messages(header, delta_values(), FLOAT32))
    header.session_id = "7" * 32
    with refused("ENCODING_UNSUPPORTED", INVALID):
        await send(stubs, push_messages(header, delta_values(), INT4))
    with refused("RUN_DRAFT", PRECONDITION):
        await stubs.runs.CommitRun(runs.CommitRunRequest(name="new", run_uid=draft.uid))


async def test_two_runs_on_one_syncer_do_not_touch_each_other(trial: Trial) -> None:
    other, weights = await create_run(trial.stubs, "other", seed=2)
    await attached(trial.stubs, other, "us")
    foreign = trial.header(run_uid=other.uid)
    with refused("RUN_REPLACED", PRECONDITION):
        await trial.learner.push(foreign, delta_values())
    foreign.run = "other"
    with refused("SESSION_UNKNOWN", PRECONDITION):
        await trial.learner.push(foreign, delta_values())
    await trial.still_merges()
    untouched = await pull(trial.stubs, other, "body")
    assert untouched.version == 0
    assert np.array_equal(untouched.values, weights["body"])


class Weather:
    """Faults of the store's writes that a test turns on and off."""

    def __init__(self) -> None:
        self.error: type[StoreError] | None = None

    def __call__(self, operation: str, name: str) -> Fault:
        return Fault(Effect.ERROR_BEFORE, self.error) if self.error and operation == "write" else NO_FAULT


@pytest.mark.parametrize("error", [StoreFullError, StoreUnavailableError])
async def test_a_store_that_takes_nothing_is_said_and_loses_nothing(store_url: str, error: type[StoreError]) -> None:
    weather = Weather()
    objects = FaultyObjects(open_objects(store_url), weather, clock=SystemClock(), late=LateWrites())
    async with serving(objects, LOCAL) as server, connected(server.port) as stubs:
        run, _ = await create_run(stubs)
        trial = Trial(stubs, run, await attached(stubs, run), await pull(stubs, run, "body"))
        weather.error = error
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await trial.learner.push(trial.header(), delta_values())
        refusal = refusal_of(caught.value)
        assert refusal.reason == error.reason
        assert refusal.retry_after_s is not None
        weather.error = None
        await trial.still_merges()


async def test_a_message_that_is_no_protobuf_is_a_bad_request(stubs: Stubs) -> None:
    malformed = b"\x0a\xff"  # a string whose end is missing
    with heard_logs() as lines:
        for method in ("Runs/CreateRun", "Exchange/QueryPush", "Exchange/PullFragment", "Exchange/Attach"):
            with refused("BAD_REQUEST", INVALID):
                await stubs.channel.stream_stream(f"/skerry.v1.{method}", None, None)(iter([malformed])).read()
    assert not [line for line in lines if line.get("exc_info")]


async def test_a_message_of_the_limit_is_taken_and_a_larger_one_refused_with_details(trial: Trial) -> None:
    answer = await trial.stubs.capabilities.GetCapabilities(capabilities_pb2.GetCapabilitiesRequest())
    limit = answer.max_message_size_bytes

    def padded(size_bytes: int) -> runs.GetRunRequest:
        """Returns a request that an unknown field makes that large."""
        request = runs.GetRunRequest(name="demo")
        value = bytes(size_bytes - request.ByteSize() - 6)  # two bytes of tag, four of length
        length = [len(value) >> shift & 127 | 128 * (shift < 21) for shift in (0, 7, 14, 21)]
        request.MergeFromString(b"\xfa\x7f" + bytes(length) + value)
        assert request.ByteSize() == size_bytes
        return request

    assert (await trial.stubs.runs.GetRun(padded(limit))).run.name == "demo"
    with refused("TOO_LARGE", EXHAUSTED) as caught:
        await trial.stubs.runs.GetRun(padded(limit + 1))
    assert str(limit) in caught.refusal.message
    assert trial.learner.call is not None
    large = types.LearnerReport(step_count=1)
    large.adopted.add(fragment="body", digest=bytes(limit))
    with refused("TOO_LARGE", EXHAUSTED):
        await trial.learner.call.write(exchange.AttachRequest(report=large))
        await trial.learner.event("draining")
