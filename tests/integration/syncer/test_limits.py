"""What one client may take of a syncer's time, memory and connections, so that the others go on."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import psutil
import pytest
import zstandard
from blake3 import blake3
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2

from skerry.v1 import exchange_pb2 as exchange
from skerry.v1 import runs_pb2 as runs
from skerry.v1 import types_pb2 as types
from skerry.wire.codecs import Compressor
from skerry.wire.digests import delta_digest
from skerry_syncer.access import limits as quotas
from skerry_syncer.run.parts import ArrivingPart, ByteBudget
from skerry_syncer.server import SyncerServer
from tests.support import forgery
from tests.support.raw_learner import (
    FLOAT32,
    RawLearner,
    Stubs,
    connected,
    create_run,
    hex_id,
    is_answer_lost,
    layout,
    pull,
    push_messages,
    refused,
    send,
)

EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
ZEROS = 2**18  # elements of the largest frame


async def attached(stubs: Stubs, name: str = "greedy") -> tuple[RawLearner, exchange.PushHeader]:
    run, _ = await create_run(stubs)
    learner = RawLearner(stubs, run, name, random.Random(7))
    await learner.attach()
    return learner, learner.header(await pull(stubs, run, "body"), "body")


async def test_a_part_that_comes_too_slowly_is_ended(stubs: Stubs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quotas, "GRACE_S", 0.3)
    learner, header = await attached(stubs)
    values = np.ones(layout("body").numel, np.float32)

    async def drip(call: Any) -> None:
        for message in push_messages(header, values, FLOAT32)[:2]:
            await call.write(message)
        for byte in forgery.float32_frame(values):
            await call.write(exchange.PushDeltaRequest(data=bytes([byte])))
            await asyncio.sleep(0.05)

    async def dripped() -> None:
        """Returns once gRPC has not lost the answer."""
        for _ in range(20):
            call = stubs.exchange.PushDelta(None)
            dripping = asyncio.create_task(drip(call))
            try:
                await call
            except grpc.aio.AioRpcError as error:
                if not is_answer_lost(error):
                    raise
            finally:
                dripping.cancel()
                await asyncio.wait([dripping])

    began_s = time.monotonic()
    with refused("TOO_SLOW", EXHAUSTED) as caught:
        await dripped()
    assert caught.refusal.retry_after_s
    assert time.monotonic() - began_s < 5
    answer = await learner.push(header, values)
    assert answer.state == exchange.PUSH_STATE_ACCEPTED
    learner.detach()


async def _create_large(stubs: Stubs, numel: int) -> exchange.PushHeader:
    """Returns a header for the initial weights of a draft with one tensor."""
    request_id = hex_id(random.Random(3))
    draft = await stubs.runs.CreateRun(
        runs.CreateRunRequest(
            request_id=request_id,
            name="large",
            tensors=[types.Tensor(name="w", shape=[numel], dtype="float32")],
            fragments=[types.Fragment(name="all", tensors=["w"])],
        )
    )
    return exchange.PushHeader(
        run="large",
        run_uid=draft.run.uid,
        learner_id="a",
        session_id=request_id,
        delta_id="1" * 32,
        fragment="all",
        base_version=-1,
    )


def _zeros(count: int) -> Iterator[bytes]:
    payload = zstandard.ZstdCompressor(level=19).compress(bytes(4 * ZEROS))
    for number in range(count):
        yield forgery.frame(payload, compressor=Compressor.ZSTD, first=number * ZEROS, numel=ZEROS, raw_size=4 * ZEROS)


async def test_zeros_that_decode_to_hundreds_of_megabytes_are_not_decoded_on_the_loop(
    stubs: Stubs, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, feed = set[str](), ArrivingPart.feed

    def spied(self: ArrivingPart, data: bytes | memoryview) -> None:
        threads.add(threading.current_thread().name)
        feed(self, data)

    monkeypatch.setattr(ArrivingPart, "feed", spied)
    data = b"".join(_zeros(100))
    assert len(data) < 31 * 2**10
    header = await _create_large(stubs, 100 * ZEROS)
    with refused("DIGEST_MISMATCH", grpc.StatusCode.INVALID_ARGUMENT):
        await stubs.exchange.PushDelta(iter(forgery.messages(header, data, numel=100 * ZEROS)))
    assert "MainThread" not in threads


async def test_what_was_refused_is_freed(stubs: Stubs) -> None:
    run, _ = await create_run(stubs)
    hello = RawLearner(stubs, run, "a", random.Random(7)).hello()
    hello.run_uid = "0" * 32
    for number in range(2000):
        hello.tensors.add(name=f"{number}" + "n" * 100, shape=[1])
    gc.collect()
    gc.disable()
    process, grown = psutil.Process(), list[int]()
    try:
        for _ in range(2):
            before = process.memory_info().rss
            for _ in range(40):
                call = stubs.exchange.Attach(iter([exchange.AttachRequest(hello=hello)]))
                assert await call.code() != grpc.StatusCode.OK
            grown.append(process.memory_info().rss - before)
    finally:
        gc.enable()
    assert grown[1] < 5 * 2**20, grown


async def _created_large(stubs: Stubs, numel: int) -> exchange.PullFragmentRequest:
    """Creates a run of one tensor; returns what pulls all of it."""
    header = await _create_large(stubs, numel)
    frames = [
        forgery.float32_frame(np.zeros(min(ZEROS, numel - at), np.float32), first=at) for at in range(0, numel, ZEROS)
    ]
    digest = blake3(bytes(4 * numel)).digest()
    messages = [exchange.PushDeltaRequest(header=header)]
    messages.append(exchange.PushDeltaRequest(part=exchange.PartBegin(numel=numel)))
    messages += [exchange.PushDeltaRequest(data=frame) for frame in frames]
    messages.append(exchange.PushDeltaRequest(part_end=exchange.PartEnd(digest=digest)))
    whole = delta_digest([(0, numel, digest)])
    messages.append(exchange.PushDeltaRequest(complete=exchange.PushComplete(digest=whole)))
    await send(stubs, messages)
    await stubs.runs.CommitRun(runs.CommitRunRequest(name=header.run, run_uid=header.run_uid))
    return exchange.PullFragmentRequest(run=header.run, fragment="all", from_version=-1, is_newest=True)


async def test_downloads_that_nobody_reads_are_ended(server: SyncerServer, monkeypatch: pytest.MonkeyPatch) -> None:
    async with connected(server.port, has_fixed_windows=True) as stubs, connected(server.port) as honest:
        request = await _created_large(honest, 2**22)
        budget = server.host.budget
        monkeypatch.setattr(quotas, "GRACE_S", 0.2)
        monkeypatch.setattr(quotas, "LEAST_BYTES_A_SECOND", 2**24)
        calls = [stubs.exchange.PullFragment(request) for _ in range(40)]
        async with asyncio.timeout(20):
            while not budget.used_bytes:
                await asyncio.sleep(0.02)
        await _released(budget)  # all were ended, though no client has read or left
        with refused("TOO_SLOW", EXHAUSTED):
            async for _ in calls[0]:
                pass
        for call in calls:
            call.cancel()


@pytest.fixture
def without_collector() -> Iterator[None]:
    """Stands for Python's garbage collector that finds nothing old enough to look at, which may be so for hours."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("without_collector")
@pytest.mark.parametrize(
    ("method", "requests", "code"),
    [
        ("skerry.v1.Runs/ListRuns", [runs.ListRunsRequest()], grpc.StatusCode.OK),
        ("skerry.v1.Runs/GetRun", [runs.GetRunRequest(name="no-such-run")], grpc.StatusCode.NOT_FOUND),
        (
            "skerry.v1.Exchange/PullFragment",
            [exchange.PullFragmentRequest(run="no-such-run")],
            grpc.StatusCode.NOT_FOUND,
        ),
        (
            "skerry.v1.Exchange/PushDelta",
            3 * [exchange.PushDeltaRequest(data=b"before its header")],
            grpc.StatusCode.INVALID_ARGUMENT,
        ),
        (
            "skerry.v1.Exchange/Attach",
            [exchange.AttachRequest(leave=exchange.Leave())],
            grpc.StatusCode.INVALID_ARGUMENT,
        ),
        (
            "grpc.health.v1.Health/Check",
            [health_pb2.HealthCheckRequest(service="no such service")],
            grpc.StatusCode.NOT_FOUND,
        ),
    ],
)
async def test_a_connection_takes_calls_however_many_there_were(
    method: str, requests: list[Message], code: grpc.StatusCode, stubs: Stubs
) -> None:
    messages = [one.SerializeToString() for one in requests]
    for _ in range(200):
        try:
            await stubs.channel.stream_unary(f"/{method}", None, None)(iter(messages), timeout=10)
            answered = grpc.StatusCode.OK
        except grpc.aio.AioRpcError as error:
            answered = code if is_answer_lost(error) else error.code()
        assert answered == code


@pytest.mark.usefixtures("without_collector")
async def test_a_connection_takes_calls_however_many_were_given_up(stubs: Stubs) -> None:
    learner, header = await attached(stubs)
    for number in range(200):
        watch, push = stubs.exchange.Watch(exchange.WatchRequest(run="demo")), stubs.exchange.PushDelta(None)
        await watch.read()
        await push.write(exchange.PushDeltaRequest(header=header))
        watch.cancel()
        push.cancel()
        assert (await stubs.runs.ListRuns(runs.ListRunsRequest(), timeout=10)).runs, number
    learner.detach()


async def _released(budget: ByteBudget) -> None:
    """Returns when nothing is held and no call that had not begun yet takes anything."""
    free_s = 0.0
    async with asyncio.timeout(20):
        while free_s < 0.5:
            await asyncio.sleep(0.05)
            free_s = 0.0 if budget.used_bytes else free_s + 0.05


async def test_one_connection_has_a_bounded_number_of_streams(stubs: Stubs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quotas, "CALLS_AT_ONCE", 10_000)
    await create_run(stubs)
    watches = [stubs.exchange.Watch(exchange.WatchRequest(run="demo")) for _ in range(quotas.MAX_STREAMS)]
    async with asyncio.timeout(30):
        await asyncio.gather(*(watch.read() for watch in watches))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stubs.runs.GetRun(runs.GetRunRequest(name="demo"), timeout=0.5)
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    watches[0].cancel()
    assert (await stubs.runs.GetRun(runs.GetRunRequest(name="demo"), timeout=30)).run.name == "demo"
    for watch in watches:
        watch.cancel()
