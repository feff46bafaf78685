"""What one client may take of a syncer's time, memory and connections, so that the others go on."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace

import grpc
import numpy as np
import pytest
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2

from skerry import ArrayLearner
from skerry.v1 import exchange_pb2 as exchange
from skerry.v1 import runs_pb2 as runs
from skerry_syncer.access import limits as quotas
from skerry_syncer.errors import SyncerError
from skerry_syncer.rpc.exchange import ExchangeServicer
from skerry_syncer.server import SyncerServer
from tests.support.raw_learner import (
    FLOAT32,
    Stubs,
    attached,
    connected,
    create_run,
    delta_values,
    is_answer_lost,
    pull,
    push_messages,
    refused,
)

EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_part_that_comes_too_slowly_is_ended(
    server: SyncerServer, stubs: Stubs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quotas, "GRACE_S", 0.3)
    run, _ = await create_run(stubs)
    learner = await attached(stubs, run)
    header = learner.header(await pull(stubs, run, "body"), "body")
    context = SimpleNamespace(peer=lambda: "slow")  # gRPC itself may lose the answer to a push that goes on

    async def stopped() -> AsyncIterator[exchange.PushDeltaRequest]:
        for message in push_messages(header, delta_values(), FLOAT32)[:3]:
            yield message
        await asyncio.Event().wait()

    with pytest.raises(SyncerError, match="ask QueryPush") as caught:
        await ExchangeServicer(server.host).PushDelta(stopped(), context)
    assert caught.value.reason == "TOO_SLOW"
    assert caught.value.retry_after_s
    await learner.push(header, delta_values())
    await learner.event("version_committed")


def create_large(port: int) -> None:
    """Creates a run of one fragment of 16 MiB."""
    weights = {"w": np.ones(2**22, np.float32)}
    with ArrayLearner(weights, target=f"127.0.0.1:{port}", run="large", learner_id="us", create=True):
        pass


async def test_downloads_that_nobody_reads_are_ended(server: SyncerServer, monkeypatch: pytest.MonkeyPatch) -> None:
    await asyncio.to_thread(create_large, server.port)
    budget = server.host.budget
    async with connected(server.port, has_fixed_windows=True) as stubs:
        fragment = (await stubs.runs.GetRun(runs.GetRunRequest(name="large"))).run.fragments[0].name
        request = exchange.PullFragmentRequest(run="large", fragment=fragment, from_version=-1, is_newest=True)
        monkeypatch.setattr(quotas, "GRACE_S", 0.2)
        monkeypatch.setattr(quotas, "LEAST_BYTES_A_SECOND", 2**24)
        calls = [stubs.exchange.PullFragment(request) for _ in range(40)]
        free_s = -1.0
        async with asyncio.timeout(20):  # until all were ended, though no client has read or left
            while free_s < 0.5:
                await asyncio.sleep(0.05)
                free_s = 0.0 if budget.used_bytes else free_s + 0.05 * (free_s >= 0)
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
    messages = [request.SerializeToString() for request in requests]
    for _ in range(200):
        try:
            await stubs.channel.stream_unary(f"/{method}", None, None)(iter(messages), timeout=10)
            answered = grpc.StatusCode.OK
        except grpc.aio.AioRpcError as error:
            answered = code if is_answer_lost(error) else error.code()
        assert answered == code


@pytest.mark.usefixtures("without_collector")
async def test_a_connection_takes_calls_however_many_were_given_up(stubs: Stubs) -> None:
    run, _ = await create_run(stubs)
    learner = await attached(stubs, run)
    header = learner.header(await pull(stubs, run, "body"), "body")
    for number in range(200):
        watch, push = stubs.exchange.Watch(exchange.WatchRequest(run="demo")), stubs.exchange.PushDelta(None)
        await watch.read()
        await push.write(exchange.PushDeltaRequest(header=header))
        watch.cancel()
        push.cancel()
        assert (await stubs.runs.ListRuns(runs.ListRunsRequest(), timeout=10)).runs, number
    learner.detach()
