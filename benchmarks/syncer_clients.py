"""Clients that push encoded deltas and pull updates without decoding them, so that a syncer is what is measured."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import Iterator
from typing import Any, Final

import grpc
import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from skerry.v1 import exchange_pb2 as exchange
from skerry.v1 import exchange_pb2_grpc, runs_pb2_grpc
from skerry.v1 import runs_pb2 as runs
from skerry.v1 import types_pb2 as types
from skerry.wire.codecs import Codec, Compressor, Encoding, cut_parts
from skerry.wire.digests import delta_digest
from skerry.wire.frames import encode_frames
from skerry.wire.layout import FragmentLayout, TensorSpec

COLUMNS: Final = 2048
PART_BYTES: Final = 4 * 2**20
MESSAGE_BYTES: Final = 2**20
EXACT: Final = Encoding(Codec.FLOAT32, compressor=Compressor.NONE)
Part = tuple[int, int, bytes, bytes]  # first, numel, frames, digest


class Learner:
    """Pushes the same bytes each round, and pulls the updates."""

    def __init__(self, port: int, number: int, run: types.Run, layouts: list[FragmentLayout]) -> None:
        options = [("skerry_learner", number), ("grpc.max_receive_message_length", 2**22)]
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options)
        self.control = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=[("skerry.control", number)])
        self.bulk = exchange_pb2_grpc.ExchangeStub(self.channel)
        self.id, self.session, self.run = f"learner-{number}", f"{number:032x}", run
        self.layouts, self.versions = {one.name: one for one in layouts}, {one.name: 0 for one in layouts}
        self.digests = {one.name: b"" for one in layouts}
        self.committed = {one.name: asyncio.Event() for one in layouts}
        self.step = 0

    async def attach(self) -> None:
        """Joins the run and follows its versions."""
        self.call = exchange_pb2_grpc.ExchangeStub(self.control).Attach(None)
        hello = exchange.Hello(run=self.run.name, run_uid=self.run.uid, learner_id=self.id, session_id=self.session)
        await self.call.write(exchange.AttachRequest(hello=hello))
        await self.call.read()
        self.follower = asyncio.create_task(self._follow())

    async def _follow(self) -> None:
        while isinstance(answer := await self.call.read(), exchange.AttachResponse):
            if answer.event.WhichOneof("kind") == "version_committed":
                event = answer.event.version_committed
                self.committed[event.version.fragment].set()

    async def push(self, name: str, parts: list[Part]) -> None:
        """Returns when the delta is accepted."""
        header = exchange.PushHeader(
            run=self.run.name,
            run_uid=self.run.uid,
            learner_id=self.id,
            session_id=self.session,
            delta_id=f"{random.getrandbits(128):032x}",
            fragment=name,
            base_version=self.versions[name],
            base_digest=self.digests[name],
            step_count=10,
            token_count=1000,
            last_step=self.step,
        )
        self.committed[name].clear()
        await self.bulk.PushDelta(messages(header, parts))

    async def pull(self, name: str) -> int:
        """Returns the bytes that lead to the newest version, which the next delta is based on."""
        request = exchange.PullFragmentRequest(
            run=self.run.name, run_uid=self.run.uid, fragment=name, from_version=self.versions[name], is_newest=True
        )
        size = 0
        async for answer in self.bulk.PullFragment(request):
            if answer.WhichOneof("kind") == "plan":
                target = answer.plan.target
                self.versions[name], self.digests[name] = target.version, target.digest
            else:
                size += len(answer.data.data)
        return size

    async def close(self) -> None:
        """Ends the stream and the connections."""
        self.call.cancel()
        self.follower.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.follower
        await self.channel.close(None)
        await self.control.close(None)


def messages(header: exchange.PushHeader, parts: list[Part]) -> Iterator[Any]:
    """Yields a push's messages."""
    yield exchange.PushDeltaRequest(header=header)
    for first, numel, data, digest in parts:
        yield exchange.PushDeltaRequest(part=exchange.PartBegin(first=first, numel=numel, size_bytes=len(data)))
        for at in range(0, len(data), MESSAGE_BYTES):
            yield exchange.PushDeltaRequest(data=data[at : at + MESSAGE_BYTES])
        yield exchange.PushDeltaRequest(part_end=exchange.PartEnd(digest=digest))
    digest = delta_digest([(first, numel, digest) for first, numel, _, digest in parts])
    yield exchange.PushDeltaRequest(complete=exchange.PushComplete(digest=digest))


def encoded(values: NDArray[np.float32], layout: FragmentLayout, encoding: Encoding) -> list[Part]:
    """Returns a delta's parts."""
    parts = []
    for first, numel in cut_parts(layout, encoding, PART_BYTES):
        hasher = blake3()
        data = b"".join(encode_frames(values[first : first + numel], layout, encoding, first=first, digest=hasher))
        parts.append((first, numel, data, hasher.digest()))
    return parts


def layouts_of(numel: int, count: int) -> list[FragmentLayout]:
    """Returns fragments of eight matrices and eight vectors each."""
    rows = numel // count // 8 // COLUMNS - 1
    names = itertools.count()
    layouts = []
    for index in range(count):
        tensors = []
        for _ in range(8):
            nth = next(names)
            tensors += [TensorSpec(f"m{nth}", (rows, COLUMNS)), TensorSpec(f"v{nth}", (COLUMNS,))]
        layouts.append(FragmentLayout(f"f{index}", tuple(tensors)))
    return layouts


async def _draft(stub: Any, creator: str, layouts: list[FragmentLayout], policy: types.Policy) -> types.Run:
    tensors = [types.Tensor(name=t.name, shape=t.shape, dtype="float32") for f in layouts for t in f.tensors]
    fragments = [types.Fragment(name=f.name, tensors=[t.name for t in f.tensors]) for f in layouts]
    answer = await stub.CreateRun(
        runs.CreateRunRequest(request_id=creator, name="run", tensors=tensors, fragments=fragments, policy=policy)
    )
    run: types.Run = answer.run
    return run


async def create_run(
    port: int, layouts: list[FragmentLayout], policy: types.Policy, numbers: np.random.Generator
) -> types.Run:
    """Creates a run with random weights."""
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
    stub, creator = runs_pb2_grpc.RunsStub(channel), f"{99:032x}"
    draft = await _draft(stub, creator, layouts, policy)
    for layout in layouts:
        header = exchange.PushHeader(
            run="run",
            run_uid=draft.uid,
            learner_id="creator",
            session_id=creator,
            fragment=layout.name,
            delta_id=f"{random.getrandbits(128):032x}",
            base_version=-1,
        )
        values = numbers.standard_normal(layout.numel, np.float32)
        await exchange_pb2_grpc.ExchangeStub(channel).PushDelta(messages(header, encoded(values, layout, EXACT)))
    committed = (await stub.CommitRun(runs.CommitRunRequest(name="run", run_uid=draft.uid))).run
    await channel.close(None)
    return committed
