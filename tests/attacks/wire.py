"""What the attacks say below gRPC, and how they count what they are told."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import struct
from collections import Counter
from collections.abc import Awaitable, Iterator
from typing import Any, Final

import grpc

from tests.attacks.target import Target
from tests.support.raw_learner import is_answer_lost, refusal_of


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


class Unfinished:
    """A connection whose calls each send a message but for its last byte, as fast as the server takes it."""

    def __init__(self, target: Target, method: str, *, call_count: int, size_bytes: int) -> None:
        self.sent_bytes = 0
        self.ended_count = 0  # calls; another one follows each
        self._target = target
        self._headers = header_block(method)
        self._call_count = call_count
        self._message = (size_bytes + 4, struct.pack(">BI", 0, size_bytes))
        self._windows = {0: 65_535}  # by stream; 0: of the connection
        self._initial = 65_535
        self._left: dict[int, int] = {}

    async def attack(self) -> None:
        """Goes on until the server ends the connection."""
        reader, writer = await self._target.open_connection()
        writer.write(PREFACE)
        numbers = itertools.count(1, 2)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                while len(self._left) < self._call_count:
                    stream = next(numbers)
                    writer.write(http2(1, 4, stream, self._headers))
                    self._windows[stream], self._left[stream] = self._initial, self._message[0]
                for stream in self._left:
                    writer.writelines(self._data(stream))
                await writer.drain()
                head = await reader.readexactly(9)
                payload = await reader.readexactly(int.from_bytes(head[:3]))
                writer.write(self._answer(head[3], head[4], int.from_bytes(head[5:]), payload))
        writer.close()

    def _data(self, stream: int) -> Iterator[bytes]:
        while (size := min(self._windows[0], self._windows[stream], self._left[stream], 2**14)) > 4:
            start = self._message[1] if self._left[stream] == self._message[0] else b""
            yield http2(0, 0, stream, start + bytes(size - len(start)))
            self._windows[0] -= size
            self._windows[stream] -= size
            self._left[stream] -= size
            self.sent_bytes += size

    def _answer(self, kind: int, flags: int, stream: int, payload: bytes) -> bytes:
        if (kind, flags & 1) == (4, 0):
            for number, value in struct.iter_unpack(">HI", payload):
                if number == 4:
                    self._windows = {
                        one: size if one == 0 else size + value - self._initial for one, size in self._windows.items()
                    }
                    self._initial = value
            return http2(4, 1, 0, b"")
        if (kind, flags & 1) == (6, 0):
            return http2(6, 1, 0, payload)
        if kind == 8 and stream in self._windows:
            self._windows[stream] += int.from_bytes(payload)
        elif (kind == 3 or (kind == 1 and flags & 1)) and stream in self._left:
            del self._left[stream], self._windows[stream]
            self.ended_count += 1
            return http2(3, 0, stream, struct.pack(">I", 8))
        return b""


async def told_by(call: Awaitable[Any], told: Counter[str]) -> None:
    """Awaits the call and counts its refusal."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        if is_answer_lost(error):
            told["refused; gRPC lost the reason"] += 1
            return
        try:
            told[refusal_of(error).reason] += 1
        except AssertionError:
            told[error.code().name] += 1
