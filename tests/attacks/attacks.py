"""The attacks. Each runs in a process of its own until it is killed, and counts by name what it was told."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import socket
import struct
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any, Final

import grpc
import numpy as np
from blake3 import blake3

from skerry.v1 import exchange_pb2 as exchange
from skerry.v1 import runs_pb2 as runs
from skerry.v1 import types_pb2 as types
from skerry.wire.digests import delta_digest
from skerry.wire.layout import FragmentLayout, TensorSpec
from tests.attacks.cheap import CHEAP
from tests.attacks.crowds import CROWDS
from tests.attacks.own_runs import FRAME_NUMEL, OWN_RUNS, zeros_data
from tests.attacks.strangers import STRANGERS
from tests.attacks.target import ATTACKER, Attack, Target
from tests.attacks.wire import PREFACE, header_block, http2, told_by
from tests.support import forgery
from tests.support.raw_learner import (
    FLOAT32,
    RawLearner,
    Stubs,
    hex_id,
    layout,
    part_messages,
    pull,
)


def _reset_streams() -> Iterator[bytes]:
    """Yields calls that are reset at once, a hundred at a time."""
    block = header_block("/skerry.v1.Exchange/Attach")
    numbers = itertools.count(1, 2)
    while True:
        yield b"".join(
            http2(1, 4, number, block) + http2(3, 0, number, struct.pack(">I", 8))
            for number in itertools.islice(numbers, 100)
        )


async def rapid_resets(target: Target, told: Counter[str]) -> None:
    """Opens streams and resets them at once, as fast as the connection takes them."""
    while True:
        with contextlib.suppress(OSError):
            reader, writer = await target.open_connection()
            writer.write(PREFACE)
            eating = asyncio.create_task(reader.read(-1))
            for frames in itertools.islice(_reset_streams(), 10_000):
                writer.write(frames)
                await writer.drain()
                told["streams"] += 100
            eating.cancel()
        told["connections ended"] += 1


@contextlib.asynccontextmanager
async def _large_run(target: Target) -> AsyncIterator[tuple[Stubs, exchange.PullFragmentRequest]]:
    """Yields how to pull 16 MiB of weights, of a run made for it."""
    numel = 2**22
    async with target.connected() as stubs:
        header = await _draft(stubs, "big", numel, 3)
        values = np.random.default_rng(1).standard_normal(numel).astype(np.float32)
        tensor = FragmentLayout("all", (TensorSpec("w", (numel,)),))
        messages, digest = part_messages(values, tensor, FLOAT32, 0, numel, cut=2**20)
        complete = exchange.PushComplete(digest=delta_digest([(0, numel, digest)]))
        whole = [exchange.PushDeltaRequest(header=header), *messages, exchange.PushDeltaRequest(complete=complete)]
        await stubs.exchange.PushDelta(iter(whole))
        await stubs.runs.CommitRun(runs.CommitRunRequest(name="big", run_uid=header.run_uid))
        yield stubs, exchange.PullFragmentRequest(run="big", fragment="all", from_version=-1, is_newest=True)


async def unread_pulls(target: Target, told: Counter[str]) -> None:
    """Begins 200 pulls and reads none of them."""
    async with _large_run(target) as (stubs, request):
        calls = [stubs.exchange.PullFragment(request) for _ in range(200)]
        told["pulls"] = len(calls)
        await asyncio.Event().wait()


async def greedy_pulls(target: Target, told: Counter[str]) -> None:
    """Pulls 16 MiB in 32 calls at once, as fast as they come, again and again."""
    async with _large_run(target) as (stubs, request):

        async def pull_all() -> None:
            while True:
                call: Any = stubs.exchange.PullFragment(request)
                with contextlib.suppress(grpc.aio.AioRpcError):
                    while (message := await call.read()) and isinstance(message, exchange.PullFragmentResponse):
                        told["bytes"] += message.ByteSize()

        await asyncio.gather(*(pull_all() for _ in range(32)))


async def idle_sockets(target: Target, told: Counter[str]) -> None:
    """Opens 1,100 connections that say nothing."""
    held: list[socket.socket] = []
    while True:
        try:
            if len(held) < 1100:
                held.append(socket.create_connection(("127.0.0.1", target.port), 1))
                told["sockets"] = len(held)
        except OSError as error:
            told[type(error).__name__] += 1
        await asyncio.sleep(0 if len(held) < 1100 else 0.1)


async def slow_pushes(target: Target, told: Counter[str]) -> None:
    """Begins a hundred pushes that each reserve memory and send a byte a second."""
    async with target.connected() as stubs:
        run = (await stubs.runs.GetRun(runs.GetRunRequest(name="demo"))).run
        learner = RawLearner(stubs, run, ATTACKER, random.Random(1))
        await learner.attach()
        base = await pull(stubs, run, "body")

        async def push(source: random.Random) -> None:
            while True:
                call = stubs.exchange.PushDelta(None)
                header = learner.header(base, "body")
                header.delta_id = hex_id(source)
                part = exchange.PartBegin(numel=layout("body").numel, size_bytes=32 * 2**20)
                with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    await call.write(exchange.PushDeltaRequest(header=header))
                    await call.write(exchange.PushDeltaRequest(part=part))
                    while True:
                        await call.write(exchange.PushDeltaRequest(data=b"S"))
                        await asyncio.sleep(1)
                await told_by(call, told)

        await asyncio.gather(*(push(random.Random(number)) for number in range(100)))


async def _draft(stubs: Stubs, name: str, numel: int, seed: int) -> exchange.PushHeader:
    """Returns a header for the initial weights of a draft of one tensor."""
    request_id = hex_id(random.Random(seed))
    create = runs.CreateRunRequest(
        request_id=request_id,
        name=name,
        tensors=[types.Tensor(name="w", shape=[numel], dtype="float32")],
        fragments=[types.Fragment(name="all", tensors=["w"])],
    )
    uid = (await stubs.runs.CreateRun(create)).run.uid
    return exchange.PushHeader(
        run=name,
        run_uid=uid,
        learner_id=ATTACKER,
        session_id=request_id,
        delta_id=request_id,
        fragment="all",
        base_version=-1,
    )


async def zeros(target: Target, told: Counter[str]) -> None:
    """Pushes 31 KiB that decode to some 300 MiB, again and again."""
    count = 31 * 2**10 // len(zeros_data(1))
    data = zeros_data(count)
    async with target.connected() as stubs:
        header = await _draft(stubs, "zeros", count * FRAME_NUMEL, 3)
        while True:
            header.delta_id = hex_id(random.Random(told.total()))
            messages = forgery.messages(header, data, numel=count * FRAME_NUMEL)
            await told_by(stubs.exchange.PushDelta(iter(messages)), told)


async def zero_drafts(target: Target, told: Counter[str]) -> None:
    """Pushes 3 KiB that are 32 MiB of weights to one draft after another, and commits none."""
    data, digest = zeros_data(32), blake3(bytes(32 * 4 * FRAME_NUMEL)).digest()
    async with target.connected() as stubs:
        for number in itertools.count():
            header = await _draft(stubs, f"draft{number}", 32 * FRAME_NUMEL, number)
            messages = forgery.messages(header, data, numel=32 * FRAME_NUMEL, digest=digest)
            await told_by(stubs.exchange.PushDelta(iter(messages)), told)
            told["drafts"] += 1


async def refused_hellos(target: Target, told: Counter[str]) -> None:
    """Attaches with 250 KiB of tensors to a run that is not there, as fast as it is refused."""
    tensors = [types.Tensor(name=f"{number}" + "n" * 100, shape=[1]) for number in range(2000)]
    hello = exchange.Hello(run="demo", run_uid="0" * 32, learner_id=ATTACKER, session_id="0" * 32, tensors=tensors)
    async with target.connected() as stubs:
        while True:
            call = stubs.exchange.Attach(iter([exchange.AttachRequest(hello=hello)]))
            await told_by(call.read(), told)


async def reports(target: Target, told: Counter[str]) -> None:
    """Attaches and reports as fast as the stream takes it."""
    async with target.connected() as stubs:
        run = (await stubs.runs.GetRun(runs.GetRunRequest(name="demo"))).run
        learner = RawLearner(stubs, run, ATTACKER, random.Random(1))
        await learner.attach()
        assert learner.call is not None

        async def drain(call: Any) -> None:
            while await call.read():
                pass

        draining = asyncio.create_task(drain(learner.call))
        while not draining.done():
            await learner.report()
            told["reports"] += 1


async def slow_sessions(target: Target, told: Counter[str]) -> None:
    """Does as `slow_pushes` under 40 learner ids, each with a session and a share of its own: more than all memory."""
    async with target.connected() as stubs:
        run = (await stubs.runs.GetRun(runs.GetRunRequest(name="demo"))).run
        base = await pull(stubs, run, "body")

        async def push(number: int) -> None:
            name = f"{ATTACKER}{number or ''}"
            learner = RawLearner(stubs, run, name, random.Random(number))
            await told_by(learner.attach(), told)
            while True:
                call = stubs.exchange.PushDelta(None)
                with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    await call.write(exchange.PushDeltaRequest(header=learner.header(base, "body")))
                    part = exchange.PartBegin(numel=layout("body").numel, size_bytes=32 * 2**20)
                    await call.write(exchange.PushDeltaRequest(part=part))
                    while True:
                        await call.write(exchange.PushDeltaRequest(data=b"S"))
                        await asyncio.sleep(1)
                await told_by(call, told)

        await asyncio.gather(*(push(number) for number in range(40)))


async def learner_ids(target: Target, told: Counter[str]) -> None:
    """Attaches under one new learner id after another, and never says goodbye."""
    async with target.connected() as stubs:
        run = (await stubs.runs.GetRun(runs.GetRunRequest(name="demo"))).run
        for number in itertools.count():
            learner = RawLearner(stubs, run, f"id{number}", random.Random(number))
            refused = told.total()
            await told_by(learner.attach(), told)
            told["attached"] += told.total() == refused
            learner.detach()


async def watches(target: Target, told: Counter[str]) -> None:
    """Watches from the first entry ten times at once, again and again."""
    async with target.connected() as stubs:

        async def watch() -> None:
            while True:
                call: Any = stubs.exchange.Watch(exchange.WatchRequest(run="demo", after_position=1))
                with contextlib.suppress(grpc.aio.AioRpcError):
                    newest = (await call.read()).start.run.position
                    while (await call.read()).event.position < newest:
                        told["events"] += 1
                call.cancel()

        await asyncio.gather(*(watch() for _ in range(10)))


async def live_watches(target: Target, told: Counter[str]) -> None:
    """Watches 60 times over each of 8 connections, and reports as fast as the streams take it."""
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(8):
            stubs = await stack.enter_async_context(target.connected())
            for _ in range(60):
                call: Any = stubs.exchange.Watch(exchange.WatchRequest(run="demo"))
                await told_by(call.read(), told)
                stack.callback(call.cancel)
                told["watches"] += 1
        await reports(target, told)


async def returns(target: Target, told: Counter[str]) -> None:
    """Attaches, leaves and attaches again with the same session, as fast as it is let."""
    async with target.connected() as stubs:
        run = (await stubs.runs.GetRun(runs.GetRunRequest(name="demo"))).run
        learner = RawLearner(stubs, run, ATTACKER, random.Random(1))

        async def again() -> None:
            await learner.attach()
            await learner.leave()
            told["returns"] += 1

        while True:
            await told_by(again(), told)


async def reads(target: Target, told: Counter[str]) -> None:
    """Asks for a run and its versions without pause, in 100 calls at once over each of two connections."""
    get, versions = runs.GetRunRequest(name="demo"), runs.ListVersionsRequest(name="demo", fragment="body")

    async def ask(stubs: Stubs) -> None:
        while True:
            await told_by(stubs.runs.GetRun(get), told)
            await told_by(stubs.runs.ListVersions(versions), told)
            told["answers"] += 2

    async with target.connected() as one, target.connected() as other:
        await asyncio.gather(*(ask(stubs) for stubs in (one, other) for _ in range(100)))


async def repeated_names(target: Target, told: Counter[str]) -> None:
    """Resumes a download that names one object 15,000 times, in 32 calls at once."""
    async with _large_run(target) as (stubs, request):
        first = await anext(aiter(stubs.exchange.PullFragment(request)))
        request.resume.objects.extend([first.plan.objects[0].name] * 15_000)
        request.is_newest = False

        async def pull_all() -> None:
            while True:
                call: Any = stubs.exchange.PullFragment(request)
                await told_by(call.read(), told)
                call.cancel()

        await asyncio.gather(*(pull_all() for _ in range(32)))


ATTACKS: Final[Mapping[str, Attack]] = {
    one.__name__.replace("_", "-"): one
    for one in (
        *(
            rapid_resets,
            unread_pulls,
            greedy_pulls,
            idle_sockets,
            slow_pushes,
            slow_sessions,
            zeros,
            refused_hellos,
            reports,
        ),
        *(zero_drafts, learner_ids, watches, live_watches, returns, reads, repeated_names),
        *CROWDS,
        *CHEAP,
        *OWN_RUNS,
        *STRANGERS,
    )
}
