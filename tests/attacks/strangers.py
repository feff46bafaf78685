"""Attacks that need no identity: what they send is to be refused before anybody asks who sent it."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from typing import Any, Final

import grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tests.attacks.target import Attack, Target
from tests.attacks.wire import PREFACE, Unfinished, header_block, http2, told_by


async def gzip_bombs(target: Target, told: Counter[str]) -> None:
    """Sends four messages at a time that gRPC compressed from 100 MiB of zeros to 0.1 MB, again and again."""
    zeros = bytes(100 * 2**20)
    async with target.connected() as stubs:
        call: Any = stubs.channel.unary_unary("/skerry.v1.Runs/GetRun", None, None)
        while True:
            four = (told_by(call(zeros, compression=grpc.Compression.Gzip), told) for _ in range(4))
            await asyncio.gather(*four)


async def unfinished_messages(target: Target, told: Counter[str]) -> None:
    """Sends messages of 8 MB but for their last byte in 128 calls of one connection."""
    while True:
        connection = Unfinished(target, "/skerry.v1.Runs/CreateRun", call_count=128, size_bytes=8_380_000)
        attacking = asyncio.create_task(connection.attack())
        while not (await asyncio.wait([attacking], timeout=0.1))[0]:
            told["bytes"] = max(told["bytes"], connection.sent_bytes)
            told["ended"] = max(told["ended"], connection.ended_count)


async def held_connections(target: Target, told: Counter[str]) -> None:
    """Opens 2,000 connections and watches the health over each."""
    watch = http2(1, 4, 1, header_block("/grpc.health.v1.Health/Watch")) + http2(0, 1, 1, bytes(5))
    held: list[asyncio.StreamWriter] = []
    while True:
        try:
            if len(held) < 2000:
                _, writer = await target.open_connection()
                held.append(writer)
                writer.write(PREFACE + watch)
                told["connections"] = len(held)
        except OSError as error:
            told[type(error).__name__] += 1
        await asyncio.sleep(0 if len(held) < 2000 else 0.1)


async def garbage(target: Target, told: Counter[str]) -> None:
    """Sends what is no message to health and reflection, as fast as it is refused."""
    async with target.connected() as stubs:
        calls: list[Any] = [
            stubs.channel.stream_unary(f"/grpc.{method}", None, None)
            for method in ("health.v1.Health/Check", "reflection.v1.ServerReflection/ServerReflectionInfo")
        ]
        while True:
            for call in calls:
                await told_by(call(iter([b"\xff" * 2**20])), told)


async def reflection(target: Target, told: Counter[str]) -> None:
    """Asks reflection without pause, in 100 streams over each of two connections."""
    request = reflection_pb2.ServerReflectionRequest(file_containing_symbol="skerry.v1.Exchange")

    async def ask(stub: reflection_pb2_grpc.ServerReflectionStub) -> None:
        while True:
            call: Any = stub.ServerReflectionInfo(itertools.repeat(request))
            try:
                async for _ in call:
                    told["answers"] += 1
            except grpc.aio.AioRpcError as error:
                told[str(error.code())] += 1

    async with target.connected() as one, target.connected() as other:
        stubs = [reflection_pb2_grpc.ServerReflectionStub(each.channel) for each in (one, other)]
        await asyncio.gather(*(ask(stub) for stub in stubs for _ in range(100)))


STRANGERS: Final[tuple[Attack, ...]] = (gzip_bombs, unfinished_messages, held_connections, garbage, reflection)
