"""Attacks that need no identity: what they send is to be refused before anybody asks who sent it."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from typing import Any, Final

import grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tests.attacks.wire import PREFACE, Attack, Unfinished, header_block, http2, told_by


async def gzip_bombs(port: int, told: Counter[str]) -> None:
    """Sends four messages at a time that gRPC compressed from 100 MiB of zeros to 0.1 MB, again and again."""
    zeros = bytes(100 * 2**20)
    options = [("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        call: Any = channel.unary_unary("/skerry.v1.Runs/GetRun", None, None)
        while True:
            four = (told_by(call(zeros, compression=grpc.Compression.Gzip), told) for _ in range(4))
            await asyncio.gather(*four)


async def unfinished_messages(port: int, told: Counter[str]) -> None:
    """Sends messages of 8 MB but for their last byte in 128 calls of one connection."""
    while True:
        connection = Unfinished(port, "/skerry.v1.Runs/CreateRun", call_count=128, size_bytes=8_380_000)
        attacking = asyncio.create_task(connection.attack())
        while not (await asyncio.wait([attacking], timeout=0.1))[0]:
            told["bytes"] = max(told["bytes"], connection.sent_bytes)
            told["ended"] = max(told["ended"], connection.ended_count)


async def held_connections(port: int, told: Counter[str]) -> None:
    """Opens 2,000 connections and watches the health over each."""
    watch = http2(1, 4, 1, header_block("/grpc.health.v1.Health/Watch")) + http2(0, 1, 1, bytes(5))
    held: list[asyncio.StreamWriter] = []
    while True:
        try:
            if len(held) < 2000:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                held.append(writer)
                writer.write(PREFACE + watch)
                told["connections"] = len(held)
        except OSError as error:
            told[type(error).__name__] += 1
        await asyncio.sleep(0 if len(held) < 2000 else 0.1)


async def garbage(port: int, told: Counter[str]) -> None:
    """Sends what is no message to health and reflection, as fast as it is refused."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        calls: list[Any] = [
            channel.stream_unary(f"/grpc.{method}", None, None)
            for method in ("health.v1.Health/Check", "reflection.v1.ServerReflection/ServerReflectionInfo")
        ]
        while True:
            for call in calls:
                await told_by(call(iter([b"\xff" * 2**20])), told)


async def reflection(port: int, told: Counter[str]) -> None:
    """Asks reflection without pause, in 100 streams over each of two connections."""
    request = reflection_pb2.ServerReflectionRequest(file_containing_symbol="skerry.v1.Exchange")
    options = [("grpc.use_local_subchannel_pool", 1)]

    async def ask(stub: reflection_pb2_grpc.ServerReflectionStub) -> None:
        while True:
            call: Any = stub.ServerReflectionInfo(itertools.repeat(request))
            try:
                async for _ in call:
                    told["answers"] += 1
            except grpc.aio.AioRpcError as error:
                told[str(error.code())] += 1

    async with (
        grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as one,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as other,
    ):
        stubs = [reflection_pb2_grpc.ServerReflectionStub(channel) for channel in (one, other)]
        await asyncio.gather(*(ask(stub) for stub in stubs for _ in range(100)))


STRANGERS: Final[tuple[Attack, ...]] = (gzip_bombs, unfinished_messages, held_connections, garbage, reflection)
