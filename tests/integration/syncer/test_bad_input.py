"""What a syncer refuses, with which status and reason, and that a refusal loses nothing."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf.duration_pb2 import Duration

from skerry.runtime.clock import SystemClock
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
    QUICK,
    Float32s,
    Pulled,
    RawLearner,
    Stubs,
    connected,
    create_run,
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
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE

BODY = layout("body")
MATRIX_NUMEL = 1200  # of the fragment's first tensor


class Trial:
    """An attached learner with the newest `body`, and the check that a refusal harmed nothing."""

    def __init__(self, stubs: Stubs, run: types.Run, learner: RawLearner, base: Pulled) -> None:
        self.stubs, self.run, self.learner, self.base = stubs, run, learner, base

    def header(self, **changes: object) -> exchange.PushHeader:
        header = self.learner.header(self.base, "body")
        for name, value in changes.items():
            setattr(header, name, value)
        return header

    def values(self, seed: int = 1) -> Float32s:
        return np.random.default_rng(seed).standard_normal(BODY.numel).astype(np.float32)

    async def send(self, messages: Sequence[exchange.PushDeltaRequest]) -> exchange.PushDeltaResponse:
        return await send(self.stubs, messages)

    async def still_merges(self) -> None:
        """An honest delta from the same base is accepted and merged, and nothing else ever was."""
        header = self.learner.header(self.base, "body")
        answer = await self.learner.push(header, self.values())
        assert answer.state == exchange.PUSH_STATE_ACCEPTED
        committed = (await self.learner.event("version_committed")).version_committed
        assert [one.delta_id for one in committed.merged] == [header.delta_id]
        after = await pull(self.stubs, self.run, "body", base=self.base)
        assert after.version == self.base.version + 1


@pytest.fixture
async def trial(stubs: Stubs) -> AsyncIterator[Trial]:
    run, _ = await create_run(stubs)
    learner = RawLearner(stubs, run, "stranger", random.Random(7))
    await learner.attach()
    yield Trial(stubs, run, learner, await pull(stubs, run, "body"))
    learner.detach()


async def test_an_unknown_run_is_refused_by_every_method(stubs: Stubs) -> None:
    uid = "0" * 32
    unknown = types.Run(name="nowhere", uid=uid)
    header = exchange.PushHeader(run="nowhere", run_uid=uid, learner_id="stranger", session_id=uid, delta_id=uid)
    calls: list[Callable[[], Awaitable[object]]] = [
        lambda: stubs.runs.GetRun(runs.GetRunRequest(name="nowhere")),
        lambda: stubs.runs.GetRun(runs.GetRunRequest(name="nowhere", run_uid=uid)),
        lambda: stubs.runs.CommitRun(runs.CommitRunRequest(name="nowhere", run_uid=uid)),
        lambda: stubs.runs.CloseRun(runs.CloseRunRequest(name="nowhere")),
        lambda: stubs.runs.DeleteRun(runs.DeleteRunRequest(name="nowhere", run_uid=uid)),
        lambda: RawLearner(stubs, unknown, "stranger", random.Random(1)).attach(),
        lambda: pull(stubs, unknown, "body"),
        lambda: stubs.exchange.Watch(exchange.WatchRequest(run="nowhere")).read(),
        lambda: stubs.exchange.PushDelta(iter([exchange.PushDeltaRequest(header=header)])),
    ]
    for call in calls:
        with refused("RUN_NOT_FOUND", NOT_FOUND):
            await call()


@pytest.mark.parametrize("name", ["../other", "/etc", "..", "", "UPPER", "x" * 65, "a\x00b"])
async def test_a_name_that_is_like_a_path_is_refused_before_anything_else(stubs: Stubs, name: str) -> None:
    run = types.Run(name=name, uid="0" * 32)
    tensors, fragments = plan_messages()
    with refused("BAD_NAME", INVALID):
        await stubs.runs.CreateRun(
            runs.CreateRunRequest(request_id="0" * 32, name=name, tensors=tensors, fragments=fragments)
        )
    with refused("BAD_NAME", INVALID):
        await stubs.runs.GetRun(runs.GetRunRequest(name=name))
    with refused("BAD_NAME", INVALID):
        await RawLearner(stubs, run, "stranger", random.Random(1)).attach()
    with refused("BAD_NAME", INVALID):
        await pull(stubs, run, "body")


@pytest.mark.parametrize("change", [{"name": "renamed"}, {"shape": [41, 30]}])
async def test_tensors_that_are_not_the_runs_are_refused(trial: Trial, change: dict[str, Any]) -> None:
    hello = trial.learner.hello()
    hello.learner_id = "other"
    hello.tensors[0].CopyFrom(types.Tensor(**({"name": hello.tensors[0].name, "shape": [40, 30]} | change)))
    with refused("SHAPE_MISMATCH", INVALID) as caught:
        await trial.stubs.exchange.Attach(iter([exchange.AttachRequest(hello=hello)])).read()
    assert "weight" in caught.refusal.message
    await trial.still_merges()


async def test_a_plan_that_is_no_partition_is_refused(stubs: Stubs) -> None:
    tensors, fragments = plan_messages()
    fragments[0].tensors.append("head.weight")
    with refused("SHAPE_MISMATCH", INVALID):
        await stubs.runs.CreateRun(
            runs.CreateRunRequest(request_id="0" * 32, name="demo", tensors=tensors, fragments=fragments)
        )


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
async def test_a_delta_that_is_not_finite_is_refused(trial: Trial, poison: float) -> None:
    values = trial.values()
    values[17] = poison
    with refused("NON_FINITE", INVALID):
        await trial.send(forgery.messages(trial.header(), forgery.float32_frame(values), numel=BODY.numel))
    await trial.still_merges()


def _truncated(data: bytes) -> bytes:
    return data[:-5]


def _corrupt(data: bytes) -> bytes:
    return data[:200] + bytes([data[200] ^ 1]) + data[201:]


def _not_a_frame(data: bytes) -> bytes:
    return b"HTTP" + data[4:]


@pytest.mark.parametrize("harm", [_truncated, _corrupt, _not_a_frame])
async def test_a_chunk_that_is_truncated_or_corrupt_is_refused(trial: Trial, harm: Callable[[bytes], bytes]) -> None:
    header = trial.header()
    data = harm(forgery.float32_frame(trial.values()))
    with refused("BAD_FRAME", INVALID):
        await trial.send(forgery.messages(header, data, numel=BODY.numel))
    # The undamaged bytes under the same id are accepted: nothing of the damaged ones was kept.
    answer = await trial.send(push_messages(header, trial.values(), FLOAT32))
    assert answer.state == exchange.PUSH_STATE_ACCEPTED


@pytest.fixture
def traced() -> Iterator[None]:
    """Traces allocations until the server is gone: Python 3.11 can crash where tracing ends while gRPC allocates."""
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.mark.usefixtures("traced")
async def test_a_decompression_bomb_is_refused_before_it_grows(trial: Trial) -> None:
    data = forgery.bomb(BODY.numel, 16 * 2**20)
    tracemalloc.reset_peak()
    before_bytes, _ = tracemalloc.get_traced_memory()
    with refused("BAD_FRAME", INVALID) as caught:
        await trial.send(forgery.messages(trial.header(), data, numel=BODY.numel))
    _, peak_bytes = tracemalloc.get_traced_memory()
    assert caught.refusal.metadata["wire_reason"] == "BOMB"
    assert peak_bytes - before_bytes < 8 * 2**20
    await trial.still_merges()


async def test_a_push_that_is_larger_than_the_fragment_is_refused(trial: Trial) -> None:
    with refused("OUT_OF_RANGE", INVALID):
        await trial.send(forgery.messages(trial.header(), b"", numel=BODY.numel + 1))
    with refused("OUT_OF_RANGE", INVALID):
        await trial.send(forgery.messages(trial.header(), b"", first=2**62, numel=2**62))
    longer = np.zeros(BODY.numel + 8, np.float32)
    with refused("OUT_OF_RANGE", INVALID):
        await trial.send(forgery.messages(trial.header(), forgery.float32_frame(longer), numel=BODY.numel))
    twice = forgery.float32_frame(trial.values()) * 2
    with refused("OUT_OF_RANGE", INVALID):
        await trial.send(forgery.messages(trial.header(), twice, numel=BODY.numel))
    await trial.still_merges()


async def test_a_part_that_is_larger_than_the_server_allows_is_refused(trial: Trial) -> None:
    def endless() -> Sequence[exchange.PushDeltaRequest]:
        # More bytes than a part may have, whatever the frames in them are.
        head = forgery.messages(trial.header(), b"", numel=BODY.numel)[:2]
        return [*head, *(exchange.PushDeltaRequest(data=bytes(2**20)) for _ in range(40))]

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await trial.send(endless())
    assert caught.value.code() in {INVALID, EXHAUSTED}
    await trial.still_merges()


async def test_a_digest_that_does_not_match_is_refused(trial: Trial) -> None:
    data = forgery.float32_frame(trial.values())
    with refused("DIGEST_MISMATCH", INVALID):
        await trial.send(forgery.messages(trial.header(), data, numel=BODY.numel, digest=bytes(32)))
    messages = push_messages(trial.header(), trial.values(), INT4)
    messages[-1].complete.digest = bytes(32)
    with refused("DIGEST_MISMATCH", INVALID):
        await trial.send(messages)
    await trial.still_merges()


async def test_a_codec_block_that_is_not_offered_is_refused(trial: Trial) -> None:
    data = forgery.int4_frame_with_scale(1.0, MATRIX_NUMEL, block=8)
    with refused("ENCODING_UNSUPPORTED", INVALID):
        await trial.send(forgery.messages(trial.header(), data, numel=BODY.numel))
    await trial.still_merges()


async def test_a_push_with_parts_missing_is_refused(trial: Trial) -> None:
    messages = push_messages(trial.header(), trial.values(), INT4, parts=((0, 512), (512, 728)))
    ends = [at for at, message in enumerate(messages) if message.WhichOneof("kind") == "part_end"]
    with refused("INCOMPLETE", PRECONDITION):
        await trial.send([*messages[: ends[0] + 1], messages[-1]])
    await trial.still_merges()


@pytest.mark.parametrize(
    ("changes", "reason", "status"),
    [
        ({"step_count": 2**53 + 1}, "BAD_REQUEST", INVALID),
        ({"token_count": 2**53 + 1}, "BAD_REQUEST", INVALID),
        ({"token_count": 0}, "BAD_REQUEST", INVALID),
        ({"base_digest": bytes(500_000)}, "BAD_REQUEST", INVALID),
        ({"base_version": 3}, "BASE_FUTURE", PRECONDITION),
        ({"base_digest": bytes(32)}, "BASE_FOREIGN", PRECONDITION),
        ({"session_id": "2" * 32}, "SESSION_UNKNOWN", PRECONDITION),
        ({"fragment": "../body"}, "FRAGMENT_NOT_FOUND", NOT_FOUND),
        ({"learner_id": "../../x"}, "BAD_NAME", INVALID),
        ({"session_id": "../../x"}, "BAD_NAME", INVALID),
        ({"delta_id": "../../x"}, "BAD_NAME", INVALID),
        ({"run_uid": "../../x"}, "BAD_NAME", INVALID),
    ],
)
async def test_a_header_that_can_not_be_right_is_refused(
    trial: Trial, changes: dict[str, object], reason: str, status: grpc.StatusCode
) -> None:
    with refused(reason, status):
        await trial.send([exchange.PushDeltaRequest(header=trial.header(**changes))])
    await trial.still_merges()


async def test_a_push_of_more_parts_than_one_entry_holds_is_refused(
    trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = tuple((first, 40) for first in range(0, BODY.numel, 40))
    messages = push_messages(trial.header(), trial.values(), FLOAT32, parts=parts)
    with monkeypatch.context() as patch:
        patch.setattr(log, "MAX_APPEND_BYTES", 2_000)
        with refused("TOO_LARGE", EXHAUSTED):
            await trial.send(messages)
    await trial.still_merges()


async def test_a_base_that_is_too_old_is_refused(trial: Trial) -> None:
    change = types.Policy(max_staleness=0)
    await trial.stubs.runs.SetPolicy(runs.SetPolicyRequest(request_id="1" * 32, name="demo", policy=change))
    old = trial.base
    await trial.still_merges()
    with refused("BASE_STALE", PRECONDITION):
        await trial.learner.push(trial.learner.header(old, "body"), trial.values())


async def test_a_second_delta_from_one_base_is_refused_and_names_the_first(trial: Trial) -> None:
    first = trial.header()
    await trial.learner.push(first, trial.values())
    with refused("BASE_REPEATED", EXISTS) as caught:
        await trial.learner.push(trial.header(), trial.values(2))
    assert caught.refusal.metadata["delta_id"] == first.delta_id


async def test_a_repeated_push_is_counted_once(trial: Trial) -> None:
    header = trial.header()
    answers = [await trial.learner.push(header, trial.values()) for _ in range(3)]
    assert {answer.state for answer in answers} == {exchange.PUSH_STATE_ACCEPTED}
    assert {answer.fate.delta_id for answer in answers} == {header.delta_id}
    await trial.learner.event("version_committed")
    answer = await trial.learner.push(header, trial.values())
    assert (answer.fate.fate, answer.fate.version) == (types.FATE_MERGED, 1)
    found = await trial.stubs.runs.ListVersions(runs.ListVersionsRequest(name="demo", fragment="body"))
    assert [one.delta_id for version in found.versions[:-1] for one in version.merged] == [header.delta_id]


async def test_a_repeated_push_with_other_bytes_is_refused(trial: Trial) -> None:
    header = trial.header()
    await trial.learner.push(header, trial.values())
    with refused("ID_REUSED", EXISTS):
        await trial.learner.push(header, trial.values(2))
    await trial.learner.event("version_committed")
    assert (await trial.learner.query(header)).fate.fate == types.FATE_MERGED


async def test_a_fenced_session_that_comes_back_is_refused(trial: Trial) -> None:
    newer = RawLearner(trial.stubs, trial.run, "stranger", random.Random(8))
    await newer.attach()
    with refused("SESSION_FENCED", PRECONDITION):
        await trial.learner.event("version_committed")
    with refused("SESSION_FENCED", PRECONDITION):
        await trial.learner.push(trial.header(), trial.values())
    with refused("SESSION_FENCED", PRECONDITION):
        await trial.learner.attach()
    trial.learner = newer
    await trial.still_merges()
    newer.detach()


async def test_initial_weights_of_another_creator_are_refused(stubs: Stubs) -> None:
    tensors, fragments = plan_messages()
    draft = await stubs.runs.CreateRun(
        runs.CreateRunRequest(request_id="3" * 32, name="demo", tensors=tensors, fragments=fragments)
    )
    header = exchange.PushHeader(
        run="demo",
        run_uid=draft.run.uid,
        learner_id="thief",
        session_id="4" * 32,
        delta_id="5" * 32,
        fragment="body",
        base_version=-1,
    )
    with refused("SESSION_UNKNOWN", PRECONDITION):
        await send(stubs, push_messages(header, np.zeros(BODY.numel, np.float32), FLOAT32))
    header.session_id = "3" * 32
    with refused("ENCODING_UNSUPPORTED", INVALID):
        await send(stubs, push_messages(header, np.zeros(BODY.numel, np.float32), INT4))
    with refused("RUN_DRAFT", PRECONDITION):
        await stubs.runs.CommitRun(runs.CommitRunRequest(name="demo", run_uid=draft.run.uid))


async def test_two_runs_on_one_syncer_do_not_touch_each_other(stubs: Stubs) -> None:
    one, one_weights = await create_run(stubs, "one", seed=1)
    two, two_weights = await create_run(stubs, "two", seed=2)
    source = random.Random(9)
    learners = [RawLearner(stubs, run, "same-id", source) for run in (one, two)]
    for learner in learners:
        await learner.attach()
    bases = [await pull(stubs, run, "body") for run in (one, two)]
    assert np.array_equal(bases[0].values, one_weights["body"])
    assert np.array_equal(bases[1].values, two_weights["body"])
    foreign = learners[0].header(bases[0], "body")
    foreign.run_uid = two.uid
    with refused("RUN_REPLACED", PRECONDITION):
        await learners[0].push(foreign, bases[0].values)
    foreign.run = "two"
    with refused("SESSION_UNKNOWN", PRECONDITION):
        await learners[0].push(foreign, bases[0].values)
    await learners[0].push(learners[0].header(bases[0], "body"), np.ones(BODY.numel, np.float32))
    await learners[0].event("version_committed")
    assert (await pull(stubs, one, "body")).version == 1
    assert (await pull(stubs, two, "body")).version == 0
    for learner in learners:
        learner.detach()


class Weather:
    """Faults of the store that a test turns on and off."""

    def __init__(self) -> None:
        self.error: type[StoreError] | None = None
        self.operations: tuple[str, ...] = ()

    def __call__(self, operation: str, name: str) -> Fault:
        if self.error is not None and operation in self.operations:
            return Fault(Effect.ERROR_BEFORE, self.error)
        return NO_FAULT


@pytest.mark.parametrize("error", [StoreFullError, StoreUnavailableError])
async def test_a_store_that_takes_nothing_is_said_and_loses_nothing(store_url: str, error: type[StoreError]) -> None:
    clock, weather = SystemClock(), Weather()
    objects = FaultyObjects(open_objects(store_url), weather, clock=clock, late=LateWrites())
    async with serving(objects, LOCAL) as server, connected(server.port) as stubs:
        run, _ = await create_run(stubs, policy=QUICK)
        learner = RawLearner(stubs, run, "stranger", random.Random(7))
        await learner.attach()
        trial = Trial(stubs, run, learner, await pull(stubs, run, "body"))
        header = trial.header()
        weather.error, weather.operations = error, ("write",)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await learner.push(header, trial.values())
        refusal = refusal_of(caught.value)
        assert refusal.reason == error.reason
        assert refusal.retry_after_s is not None
        weather.error = None
        answer = await learner.push(header, trial.values())
        assert answer.state == exchange.PUSH_STATE_ACCEPTED
        committed = (await learner.event("version_committed")).version_committed
        assert [one.delta_id for one in committed.merged] == [header.delta_id]
        learner.detach()


@pytest.mark.parametrize("method", ["Runs/CreateRun", "Exchange/QueryPush", "Exchange/PullFragment", "Exchange/Attach"])
async def test_a_message_that_is_no_protobuf_is_a_bad_request(stubs: Stubs, method: str) -> None:
    malformed = b"\x0a\xff"  # a string whose end is missing
    with heard_logs() as lines, refused("BAD_REQUEST", INVALID):
        await stubs.channel.stream_stream(f"/skerry.v1.{method}", None, None)(iter([malformed])).read()
    assert not [line for line in lines if line.get("exc_info")]


async def test_a_position_beyond_the_log_is_refused_without_a_traceback(trial: Trial) -> None:
    far, stubs = 2**62, trial.stubs
    resume = exchange.PullResume(object_index=2**30, offset=far, objects=["x"])
    requests = [
        exchange.PullFragmentRequest(run="demo", fragment="body", target_version=far),
        exchange.PullFragmentRequest(run="demo", fragment="body", from_version=far, is_newest=True),
        exchange.PullFragmentRequest(run="demo", fragment="body", from_version=-1, is_newest=True, resume=resume),
    ]
    with heard_logs() as lines:
        with refused("STORE_ROLLED_BACK", grpc.StatusCode.DATA_LOSS):
            await stubs.runs.GetRun(runs.GetRunRequest(name="demo", seen_position=far))
        with refused("VERSION_NOT_FOUND", NOT_FOUND):
            await stubs.exchange.Watch(exchange.WatchRequest(run="demo", after_position=far)).read()
        for request in requests:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stubs.exchange.PullFragment(request).read()
            assert caught.value.code() in {NOT_FOUND, PRECONDITION}
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stubs.runs.RollBack(runs.RollBackRequest(name="demo", request_id="1" * 32, target_position=far))
        assert caught.value.code() in {NOT_FOUND, INVALID}
    assert not [line for line in lines if line.get("exc_info")]


@pytest.mark.parametrize("count", range(1, 6))
async def test_a_push_that_ends_anywhere_is_answered(trial: Trial, count: int) -> None:
    parts, _ = part_messages(trial.values(), BODY, FLOAT32, 0, BODY.numel)
    answer = await trial.send([exchange.PushDeltaRequest(header=trial.header()), *parts][:count])
    assert answer.state == exchange.PUSH_STATE_PARTS_STORED
    await trial.still_merges()


@pytest.mark.parametrize(
    "policy",
    [
        types.Policy(delta_encoding=types.Encoding(codec=types.CODEC_INT4, block=7)),
        types.Policy(lease_term=Duration(seconds=2**40)),
        types.Policy(merge_by_fragment={"elsewhere": types.MERGE_RULE_MEAN}),
        types.Policy(quorum_count=-1),
    ],
)
async def test_a_policy_that_makes_no_sense_is_refused(trial: Trial, policy: types.Policy) -> None:
    tensors, fragments = plan_messages()
    with refused("BAD_REQUEST", INVALID):
        await trial.stubs.runs.SetPolicy(runs.SetPolicyRequest(request_id="6" * 32, name="demo", policy=policy))
    with refused("BAD_REQUEST", INVALID):
        await trial.stubs.runs.CreateRun(
            runs.CreateRunRequest(request_id="7" * 32, name="new", tensors=tensors, fragments=fragments, policy=policy)
        )
