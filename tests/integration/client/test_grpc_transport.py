"""Calls that fail on the way, over real sockets."""

from __future__ import annotations

import asyncio
import gzip
import struct
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from skerry import RunsClient, SkerryError, TryAgainError
from skerry.net.grpc_transport import GrpcTransport
from skerry.v1 import capabilities_pb2, exchange_pb2, runs_pb2
from tests.support.http2 import PREFACE, http2, literal

ASK = capabilities_pb2.GetCapabilitiesRequest()


async def test_a_call_whose_messages_fail_raises_their_error_and_is_no_cancellation_of_who_waits(target: str) -> None:
    async def attaching() -> AsyncIterator[exchange_pb2.AttachRequest]:
        yield exchange_pb2.AttachRequest(hello=exchange_pb2.Hello(run="fit"))
        raise ValueError("nothing to report")

    async def pushing() -> AsyncIterator[exchange_pb2.PushDeltaRequest]:
        yield exchange_pb2.PushDeltaRequest(header=exchange_pb2.PushHeader())
        raise ValueError("nothing to push")

    transport = GrpcTransport(target)
    with pytest.raises(ValueError, match="nothing to report"):
        [answer async for answer in transport.attach(attaching())]
    with pytest.raises(ValueError, match="nothing to push"):
        await transport.push_delta(pushing())
    await transport.close()


def test_streams_that_are_open_when_their_loop_ends_end_without_a_word(target: str) -> None:
    with RunsClient(target) as client:
        client.create_run("fit", {"w": np.ones(4, np.float32)})
    complaints = []

    async def watching() -> tuple[GrpcTransport, list[Any]]:
        transport = GrpcTransport(target)
        streams = [transport.watch(exchange_pb2.WatchRequest(run="fit")) for _ in range(16)]
        await asyncio.gather(*(anext(stream) for stream in streams))
        return transport, streams

    with asyncio.Runner() as runner:
        runner.get_loop().set_exception_handler(lambda _, context: complaints.append(context["message"]))
        transport, streams = runner.run(watching())
        runner.run(runner.get_loop().shutdown_asyncgens())
        runner.run(transport.close())
    assert (complaints, len(streams)) == ([], 16)


async def test_an_answer_that_grpc_would_have_to_inflate_is_refused() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(http2(4, 0, 0, b""))
        await reader.readexactly(len(PREFACE) - 9)
        while (head := await reader.readexactly(9))[3] != 1:  # up to the headers of the call
            await reader.readexactly(int.from_bytes(head[:3]))
        stream = int.from_bytes(head[5:])
        inflated = capabilities_pb2.GetCapabilitiesResponse(api_version="1").SerializeToString()
        data = gzip.compress(inflated)
        headers = bytes([0x88]) + literal("content-type", "application/grpc") + literal("grpc-encoding", "gzip")
        writer.write(http2(1, 4, stream, headers) + http2(0, 0, stream, struct.pack(">BI", 1, len(data)) + data))

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        transport = GrpcTransport(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
        with pytest.raises(SkerryError, match="ompression"):
            await transport.ask(lambda stubs: stubs.capabilities.GetCapabilities, ASK, timeout_s=10)
        await transport.close()


@pytest.mark.parametrize("targets", ["{0}", "{0},{0}"], ids=["one target", "several"])
async def test_every_kind_of_call_of_closed_connections_says_so(target: str, targets: str) -> None:
    transport = GrpcTransport(targets.format(target))
    await transport.close()

    async def nothing() -> AsyncIterator[Any]:
        return
        yield

    for call in (
        anext(transport.attach(nothing())),
        anext(transport.pull_fragment(exchange_pb2.PullFragmentRequest())),
        transport.push_delta(nothing()),
        transport.ask(lambda stubs: stubs.runs.GetRun, runs_pb2.GetRunRequest(), timeout_s=1.0),
    ):
        with pytest.raises(TryAgainError, match="closed"):
            await call
