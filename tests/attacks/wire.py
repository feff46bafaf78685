"""What the attacks say below gRPC, and how they count what they are told."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final

import grpc

from tests.syncer.raw_learner import refusal_of

Attack = Callable[[int, Counter[str]], Coroutine[Any, Any, None]]


def http2(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """Returns one HTTP/2 frame."""
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


# What a client's connection begins with.
PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + http2(4, 0, 0, b"")


def literal(name: str, value: str) -> bytes:
    """Returns one header as it is, not compressed."""
    return bytes([0, len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


def header_block(method: str) -> bytes:
    """Returns the headers of a call of `method`, for a HEADERS frame."""
    headers = {":method": "POST", ":scheme": "http", ":path": method, ":authority": "x"}
    headers |= {"content-type": "application/grpc", "te": "trailers"}
    return b"".join(literal(name, value) for name, value in headers.items())


async def told_by(call: Awaitable[Any], told: Counter[str]) -> None:
    """Awaits the call and counts its refusal."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        try:
            told[refusal_of(error).reason] += 1
        except AssertionError:
            told[error.code().name] += 1
