"""A learner written from the contract alone, without the client library."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
import pytest
import safetensors.numpy
from blake3 import blake3
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from numpy.typing import NDArray

from skerry.net.tls import Tls
from skerry.v1 import capabilities_pb2_grpc, exchange_pb2_grpc, runs_pb2_grpc
from skerry.v1 import exchange_pb2 as exchange
from skerry.v1 import runs_pb2 as runs
from skerry.v1 import types_pb2 as types
from skerry.wire.codecs import Codec, Compressor, Encoding
from skerry.wire.digests import delta_digest, tree_digest
from skerry.wire.frames import encode_frames
from skerry.wire.layout import FragmentLayout, TensorSpec
from tests.support.decoding import decode_frames

Float32s = NDArray[np.float32]

FLOAT32 = Encoding(codec=Codec.FLOAT32, compressor=Compressor.NONE)
INT4 = Encoding(codec=Codec.INT4)
LAYOUTS = (
    FragmentLayout("body", (TensorSpec("weight", (40, 30)), TensorSpec("bias", (40,)))),
    FragmentLayout("head", (TensorSpec("head.weight", (10, 40)),)),
)
# Every push closes a round: quorum 1 without grace. The short lease makes a fresh replica's view complete soon.
QUICK = types.Policy(inner_step_count=4, grace_factor=0.0, quorum_count=1)
QUICK.lease_term.FromMilliseconds(300)
LONG = Duration(seconds=600)  # the term of a lease that does not run out while a test goes on


def quick(**changes: Any) -> types.Policy:
    """Returns a policy by which every push closes a round, with these changes."""
    policy = types.Policy()
    policy.CopyFrom(QUICK)
    policy.MergeFrom(types.Policy(**changes))
    return policy


def delta_values(seed: int = 1) -> Float32s:
    """Returns a delta of `body` of moderate size, the same for the same seed."""
    return (0.1 * np.random.default_rng(seed).standard_normal(layout("body").numel)).astype(np.float32)


def hex_id(source: random.Random) -> str:
    return f"{source.getrandbits(128):032x}"


@dataclass
class Stubs:
    """The three services over one channel."""

    channel: grpc.aio.Channel

    def __post_init__(self) -> None:
        self.runs = runs_pb2_grpc.RunsStub(self.channel)
        self.exchange = exchange_pb2_grpc.ExchangeStub(self.channel)
        self.capabilities = capabilities_pb2_grpc.CapabilitiesStub(self.channel)


@contextlib.asynccontextmanager
async def connected(port: int, tls: Tls | None = None) -> AsyncIterator[Stubs]:
    options = [("grpc.initial_reconnect_backoff_ms", 50), ("grpc.max_reconnect_backoff_ms", 200)]
    options.append(("grpc.use_local_subchannel_pool", 1))  # a connection of its own
    if tls is None:
        opened = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options)
    else:
        files = tls.read()
        credentials = grpc.ssl_channel_credentials(files.ca, files.key, files.cert)
        opened = grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials, options=options)
    async with opened as channel:
        yield Stubs(channel)


@dataclass(frozen=True)
class Refusal:
    """The status of a refused call."""

    reason: str
    metadata: dict[str, str]
    retry_after_s: float | None
    message: str


@contextlib.contextmanager
def refused(reason: str, code: grpc.StatusCode) -> Iterator[list[Refusal]]:
    """Expects the call inside to be refused with this reason and code, and puts its refusal into the list."""
    caught: list[Refusal] = []
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        yield caught
    caught.append(refusal_of(raised.value))
    assert (caught[0].reason, raised.value.code()) == (reason, code), caught


def is_answer_lost(error: grpc.aio.AioRpcError) -> bool:
    """Whether gRPC lost the server's status, which happens when a call is refused while a message is on its way.

    Source: github.com/grpc/grpc/issues/36066.
    """
    return error.details() == "Internal error from Core"


async def send(stubs: Stubs, messages: Sequence[exchange.PushDeltaRequest]) -> exchange.PushDeltaResponse:
    """Returns the answer to a push, which is repeated, each time more slowly, while gRPC loses the answer.

    An answer that arrives between two messages isn't lost; the longer the pauses, the more answers do.
    """

    async def slowly(pause_s: float) -> AsyncIterator[exchange.PushDeltaRequest]:
        for message in messages:
            await asyncio.sleep(pause_s)
            yield message

    for nth in range(20):
        try:
            return await stubs.exchange.PushDelta(slowly(nth * 0.005))
        except grpc.aio.AioRpcError as error:
            if not is_answer_lost(error):
                raise
    raise AssertionError("the server's answer was lost every time")


def refusal_of(error: grpc.aio.AioRpcError) -> Refusal:
    """Returns the refusal, from the `google.rpc.Status` in the trailing metadata."""
    call: Any = error
    status = rpc_status.from_call(call)  # raises if its code and message are not the call's
    assert status is not None, f"no status details: {error}"
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    retry_after_s = None
    for detail in status.details:
        detail.Unpack(info)
        if detail.Unpack(retry):
            retry_after_s = retry.retry_delay.ToTimedelta().total_seconds()
    assert info.domain == "skerry"
    return Refusal(info.reason, dict(info.metadata), retry_after_s, error.details() or "")


def plan_messages() -> tuple[list[types.Tensor], list[types.Fragment]]:
    tensors = [types.Tensor(name=t.name, shape=t.shape, dtype="float32") for f in LAYOUTS for t in f.tensors]
    return tensors, [types.Fragment(name=f.name, tensors=[t.name for t in f.tensors]) for f in LAYOUTS]


def layout(fragment: str) -> FragmentLayout:
    return next(known for known in LAYOUTS if known.name == fragment)


async def create_draft(
    stubs: Stubs, name: str = "demo", *, seed: int = 0, policy: types.Policy = QUICK
) -> tuple[types.Run, dict[str, Float32s]]:
    """Creates a run that is not committed; returns it and the initial weights that it has. May be repeated."""
    source = random.Random(f"create {name} {seed}")
    numbers = np.random.default_rng(seed)
    request_id = hex_id(source)
    tensors, fragments = plan_messages()
    draft = await stubs.runs.CreateRun(
        runs.CreateRunRequest(request_id=request_id, name=name, tensors=tensors, fragments=fragments, policy=policy)
    )
    weights = {known.name: numbers.standard_normal(known.numel).astype(np.float32) for known in LAYOUTS}
    for fragment, values in weights.items():
        header = exchange.PushHeader(
            run=name,
            run_uid=draft.run.uid,
            learner_id="creator",
            session_id=request_id,
            delta_id=hex_id(source),
            fragment=fragment,
            base_version=-1,
        )
        await stubs.exchange.PushDelta(iter(push_messages(header, values, FLOAT32)))
    return draft.run, weights


async def commit(stubs: Stubs, draft: types.Run) -> types.Run:
    return (await stubs.runs.CommitRun(runs.CommitRunRequest(name=draft.name, run_uid=draft.uid))).run


async def create_run(
    stubs: Stubs, name: str = "demo", *, seed: int = 0, policy: types.Policy = QUICK
) -> tuple[types.Run, dict[str, Float32s]]:
    """Creates and commits a run; returns it and its initial weights."""
    draft, weights = await create_draft(stubs, name, seed=seed, policy=policy)
    return await commit(stubs, draft), weights


def push_messages(
    header: exchange.PushHeader,
    values: Float32s,
    encoding: Encoding,
    *,
    parts: tuple[tuple[int, int], ...] = (),
) -> list[exchange.PushDeltaRequest]:
    """Returns all messages of a push, with 700 bytes of data each."""
    fragment = layout(header.fragment)
    messages = [exchange.PushDeltaRequest(header=header)]
    digests = []
    for first, numel in parts or ((0, fragment.numel),):
        digest = blake3()
        data = b"".join(encode_frames(values[first : first + numel], fragment, encoding, first=first, digest=digest))
        messages.append(exchange.PushDeltaRequest(part=exchange.PartBegin(first=first, numel=numel)))
        messages += [exchange.PushDeltaRequest(data=data[start : start + 700]) for start in range(0, len(data), 700)]
        messages.append(exchange.PushDeltaRequest(part_end=exchange.PartEnd(digest=digest.digest())))
        digests.append((first, numel, digest.digest()))
    messages.append(exchange.PushDeltaRequest(complete=exchange.PushComplete(digest=delta_digest(digests))))
    return messages


@dataclass
class Pulled:
    """A pulled fragment."""

    version: int
    values: Float32s
    plan: exchange.PullPlan


async def pull(
    stubs: Stubs, run: types.Run, fragment: str, *, base: Pulled | None = None, target: int | None = None
) -> Pulled:
    """Pulls a fragment and checks every digest on the way."""
    request = exchange.PullFragmentRequest(
        run=run.name,
        run_uid=run.uid,
        fragment=fragment,
        from_version=-1 if base is None else base.version,
        target_version=target or 0,
        is_newest=target is None,
    )
    plan = exchange.PullPlan()
    received: list[bytearray] = []
    async for response in stubs.exchange.PullFragment(request):
        if response.WhichOneof("kind") == "plan":
            plan = response.plan
            received = [bytearray() for _ in plan.objects]
        else:
            assert len(received[response.data.object_index]) == response.data.offset
            received[response.data.object_index] += response.data.data
    values = apply_plan(plan, received, layout(fragment), None if base is None else base.values)
    return Pulled(plan.target.version, values, plan)


def apply_plan(
    plan: exchange.PullPlan, received: list[bytearray], fragment: FragmentLayout, base: Float32s | None
) -> Float32s:
    values = np.zeros(fragment.numel, np.float32) if base is None else base.copy()
    for planned, data in zip(plan.objects, received, strict=True):
        assert (len(data), blake3(data).digest()) == (planned.size_bytes, planned.digest)
        part = values[planned.first : planned.first + planned.numel]
        if planned.kind == exchange.OBJECT_KIND_SNAPSHOT:
            tensors = safetensors.numpy.load(bytes(data))
            part[:] = np.concatenate([tensors[tensor.name].reshape(-1) for tensor in fragment.tensors])
        else:
            step = np.empty(planned.numel, np.float32)
            decode_frames(bytes(data), fragment, step, first=planned.first)
            part -= step
    assert tree_digest(values) == plan.target.digest
    return values


async def read(call: Any) -> Any:
    """Returns the next message of a stream, or raises the error with which it ended."""
    message = await call.read()
    if not isinstance(message, Message):
        raise grpc.aio.AioRpcError(
            await call.code(), await call.initial_metadata(), await call.trailing_metadata(), await call.details(), None
        )
    return message


class Observer:
    """A call of Watch, whose events are read one by one, as those of an Attach are."""

    def __init__(self, stubs: Stubs, run: types.Run, after_position: int = 0) -> None:
        self._call: Any = stubs.exchange.Watch(exchange.WatchRequest(run=run.name, after_position=after_position))
        self._events: deque[types.Event] = deque()

    async def read(self) -> Any:
        """Returns the start, then an event at each call."""
        if not self._events:
            message = await self._call.read()
            if not isinstance(message, exchange.WatchResponse) or message.HasField("start"):
                return message
            self._events.extend(message.events)
        return exchange.AttachResponse(event=self._events.popleft())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)


async def observed(stubs: Stubs, run: types.Run, *, after_position: int = 0) -> Observer:
    """Returns a call of Watch that has begun."""
    call = Observer(stubs, run, after_position)
    await call.read()
    return call


async def events_until(call: Any, kind: str) -> list[types.Event]:
    """Returns the next events of an Attach or a Watch, up to the first of that kind."""
    events: list[types.Event] = []
    async with asyncio.timeout(20):
        while not events or events[-1].WhichOneof("kind") != kind:
            events.append((await read(call)).event)
    return events


@dataclass
class RawLearner:
    """One learner with one session."""

    stubs: Stubs
    run: types.Run
    learner_id: str
    source: random.Random
    session: str = ""
    step: int = 0
    seen_position: int = 0  # what its next attach says
    call: Any = None
    pushed: list[exchange.PushHeader] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.session = self.session or hex_id(self.source)

    async def attach(self) -> exchange.Attached:
        self.call = self.stubs.exchange.Attach(None)
        await self.call.write(exchange.AttachRequest(hello=self.hello()))
        attached: exchange.Attached = (await read(self.call)).attached
        return attached

    def hello(self) -> exchange.Hello:
        return exchange.Hello(
            run=self.run.name,
            run_uid=self.run.uid,
            seen_position=self.seen_position,
            learner_id=self.learner_id,
            region="here",
            session_id=self.session,
            tensors=plan_messages()[0],
        )

    async def report(self) -> None:
        report = types.LearnerReport(step_count=self.step)
        await self.call.write(exchange.AttachRequest(report=report))

    async def event(self, kind: str) -> types.Event:
        """Returns the next event of that kind, and ignores others."""
        return (await events_until(self.call, kind))[-1]

    async def leave(self) -> None:
        await self.call.write(exchange.AttachRequest(leave=exchange.Leave()))
        await self.call.done_writing()
        while isinstance(await self.call.read(), Message):
            pass

    async def advance(self, seed: int = 1) -> types.Event:
        """Pushes a delta from the newest version, and returns the event of the version that it makes."""
        base = await pull(self.stubs, self.run, "body")
        await self.push(self.header(base, "body"), delta_values(seed))
        return await self.event("version_committed")

    def header(self, base: Pulled, fragment: str, *, steps: int = 4) -> exchange.PushHeader:
        self.step += steps
        header = exchange.PushHeader(
            run=self.run.name,
            run_uid=self.run.uid,
            learner_id=self.learner_id,
            session_id=self.session,
            delta_id=hex_id(self.source),
            fragment=fragment,
            base_version=base.version,
            base_digest=base.plan.target.digest,
            step_count=steps,
            token_count=100 * steps,
            last_step=self.step,
        )
        self.pushed.append(header)
        return header

    async def push(self, header: exchange.PushHeader, values: Float32s) -> exchange.PushDeltaResponse:
        return await send(self.stubs, push_messages(header, values, INT4))

    async def query(self, header: exchange.PushHeader) -> exchange.QueryPushResponse:
        return await self.stubs.exchange.QueryPush(
            exchange.QueryPushRequest(
                run=header.run, run_uid=header.run_uid, fragment=header.fragment, delta_id=header.delta_id
            )
        )


async def attached(stubs: Stubs, run: types.Run, name: str = "eu") -> RawLearner:
    """Returns a learner that has attached; its ids follow from its name."""
    learner = RawLearner(stubs, run, name, random.Random(name))
    await learner.attach()
    return learner
