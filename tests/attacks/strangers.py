"""Attacks that need no identity: what they send is to be refused before anybody asks who sent it."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any, Final

import grpc

from tests.attacks.wire import Attack, Unfinished, told_by


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


STRANGERS: Final[tuple[Attack, ...]] = (gzip_bombs, unfinished_messages)
