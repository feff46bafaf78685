"""What one client may take of a syncer's time, memory and connections, so that the others go on."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest
from google.protobuf.message import Message

from skerry.v1 import capabilities_pb2
from skerry.v1 import exchange_pb2 as exchange
from skerry.v1 import runs_pb2 as runs
from skerry_syncer.access import limits
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
)
from tests.support.serve_process import serve_process


async def test_messages_that_grpc_compressed_are_refused_and_not_inflated(store_url: str, tmp_path: Path) -> None:
    async with serve_process(store_url, tmp_path) as serve, connected(serve.port) as stubs:
        before = serve.peak_mib()
        for method in ("/skerry.v1.Runs/GetRun", "/grpc.health.v1.Health/Check"):
            call = stubs.channel.unary_unary(method, None, None)(bytes(2**28), compression=grpc.Compression.Gzip)
            assert await call.code() == grpc.StatusCode.UNIMPLEMENTED
        assert serve.peak_mib() - before < 32


async def test_a_part_that_comes_too_slowly_is_ended(
    server: SyncerServer, stubs: Stubs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "GRACE_S", 0.3)
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
        ("Runs/ListRuns", [runs.ListRunsRequest()], grpc.StatusCode.OK),
        ("Runs/GetRun", [runs.GetRunRequest(name="no-such-run")], grpc.StatusCode.NOT_FOUND),
        ("Exchange/PushDelta", 3 * [exchange.PushDeltaRequest(data=b"no header")], grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
async def test_a_connection_takes_calls_however_many_there_were(
    method: str, requests: list[Message], code: grpc.StatusCode, stubs: Stubs
) -> None:
    messages = [request.SerializeToString() for request in requests]
    for _ in range(limits.MAX_STREAMS + 10):
        try:
            await stubs.channel.stream_unary(f"/skerry.v1.{method}", None, None)(iter(messages), timeout=10)
            answered = grpc.StatusCode.OK
        except grpc.aio.AioRpcError as error:
            answered = code if is_answer_lost(error) else error.code()
        assert answered == code


@pytest.mark.usefixtures("without_collector")
async def test_a_connection_takes_calls_however_many_were_given_up(stubs: Stubs) -> None:
    run, _ = await create_run(stubs)
    learner = await attached(stubs, run)
    header = learner.header(await pull(stubs, run, "body"), "body")
    for number in range(limits.MAX_STREAMS // 2 + 10):  # of two calls each
        watch, push = stubs.exchange.Watch(exchange.WatchRequest(run="demo")), stubs.exchange.PushDelta(None)
        await watch.read()
        await push.write(exchange.PushDeltaRequest(header=header))
        watch.cancel()
        push.cancel()
        answer = await stubs.capabilities.GetCapabilities(capabilities_pb2.GetCapabilitiesRequest(), timeout=10)
        assert answer.api_version, number
