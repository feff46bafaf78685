"""Clients that flood a syncer by mistake, each as a process: `python -m tests.e2e.floods FLOOD PORT KEYS`.

What a client does is limited by what it was told as little as it can be. The process prints a line when it has begun.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import ssl
import struct
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, Final

import grpc
import numpy as np

from skerry import ArrayLearner
from skerry.v1 import capabilities_pb2 as capabilities
from skerry.v1 import exchange_pb2 as exchange
from skerry.v1 import runs_pb2 as runs
from skerry.v1 import types_pb2 as types
from tests.support.http2 import PREFACE, header_block, http2
from tests.support.made_keys import tls_of
from tests.support.no_cloud import stay_here
from tests.support.raw_learner import Stubs, connected

CARELESS: Final = "careless"  # a learner
_AT_ONCE: Final = 64


class Unfinished:
    """A connection whose calls each send a message but for its last byte, as fast as the server takes it."""

    def __init__(self, method: str, *, call_count: int, size_bytes: int) -> None:
        self.sent_bytes = 0
        self._headers = header_block(method)
        self._call_count = call_count
        self._message = (size_bytes + 4, struct.pack(">BI", 0, size_bytes))
        self._windows = {0: 65_535}  # by stream; 0: of the connection
        self._initial = 65_535
        self._left: dict[int, int] = {}

    async def send(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Goes on until the server ends the connection; another call follows each that the server ends."""
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
                        stream: size + (value - self._initial if stream else 0)
                        for stream, size in self._windows.items()
                    }
                    self._initial = value
            return http2(4, 1, 0, b"")
        if (kind, flags & 1) == (6, 0):
            return http2(6, 1, 0, payload)
        if kind == 8 and stream in self._windows:
            self._windows[stream] += int.from_bytes(payload)
        elif (kind == 3 or (kind == 1 and flags & 1)) and stream in self._left:
            del self._left[stream], self._windows[stream]
            return http2(3, 0, stream, struct.pack(">I", 8))
        return b""


class Server:
    """The syncer that is flooded, and the client's keys."""

    def __init__(self, port: int, keys: Path) -> None:
        self.target = f"127.0.0.1:{port}"
        self.tls = tls_of(keys, CARELESS)
        self._port = port
        self._keys = keys

    def connected(self) -> contextlib.AbstractAsyncContextManager[Stubs]:
        return connected(self._port, self.tls)

    async def open_connection(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connects to say what no gRPC client says."""
        context = ssl.create_default_context(cafile=self._keys / "ca.pem")
        context.load_cert_chain(self._keys / f"{CARELESS}.pem", self._keys / f"{CARELESS}.key")
        context.set_alpn_protocols(["h2"])
        return await asyncio.open_connection("127.0.0.1", self._port, ssl=context)


async def _for_ever(call: Callable[[], Awaitable[Any]]) -> None:
    """Calls `_AT_ONCE` times at once, again and again, whatever the server says."""

    async def again() -> None:
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
                await call()

    await asyncio.gather(*(again() for _ in range(_AT_ONCE)))


async def reconnects(server: Server) -> None:
    """Connects for each call anew, without a pause."""
    while True:
        with contextlib.suppress(grpc.aio.AioRpcError):
            async with server.connected() as stubs:
                await stubs.capabilities.GetCapabilities(capabilities.GetCapabilitiesRequest(), timeout=5)


async def unfinished(server: Server) -> None:
    """Sends messages of 4 MB in 128 calls of one connection, and the last byte of none."""
    while True:
        with contextlib.suppress(OSError):
            flood = Unfinished("/skerry.v1.Runs/CreateRun", call_count=128, size_bytes=4_000_000)
            await flood.send(*await server.open_connection())


async def oversized(server: Server) -> None:
    """Sends messages of 5 MiB."""
    async with server.connected() as stubs:
        call = stubs.channel.unary_unary("/skerry.v1.Runs/GetRun", None, None)
        await _for_ever(lambda: call(bytes(5 * 2**20)))


async def streams(server: Server) -> None:
    """Watches the run once more and once more, and leaves no watch."""
    async with server.connected() as stubs:
        watches = []
        while True:
            watches.append(stubs.exchange.Watch(exchange.WatchRequest(run="demo")))
            await asyncio.sleep(0.001 if len(watches) < 1000 else 3600)


async def unread(server: Server) -> None:
    """Begins 200 downloads of 16 MiB of weights, and reads none of them."""
    weights = {"w": np.random.default_rng(1).standard_normal(2**22).astype(np.float32)}
    ArrayLearner(
        weights, target=server.target, tls=server.tls, run="big", learner_id=CARELESS, create=True, fragment_count=1
    ).close()
    request = exchange.PullFragmentRequest(run="big", fragment="fragment-00", from_version=-1, is_newest=True)
    async with server.connected() as stubs:
        calls = [stubs.exchange.PullFragment(request) for _ in range(200)]
        await asyncio.Event().wait()
        del calls


async def refused(server: Server) -> None:
    """Attaches with 250 KiB of tensors to a run that is not there."""
    tensors = [types.Tensor(name=f"{number}" + "n" * 100, shape=[1]) for number in range(2000)]
    hello = exchange.Hello(run="gone", learner_id=CARELESS, session_id="0" * 32, tensors=tensors)
    async with server.connected() as stubs:
        await _for_ever(lambda: stubs.exchange.Attach(iter([exchange.AttachRequest(hello=hello)])).read())


async def hurried(server: Server) -> None:
    """Asks for the run without a pause."""
    async with server.connected() as stubs:
        await _for_ever(lambda: stubs.runs.GetRun(runs.GetRunRequest(name="demo")))


async def given_up(server: Server) -> None:
    """Gives each of its calls up as soon as it has begun."""

    async def call(stubs: Stubs) -> None:
        begun: Any = stubs.exchange.Watch(exchange.WatchRequest(run="demo", after_position=1))
        await begun.wait_for_connection()
        await asyncio.sleep(0)
        begun.cancel()

    async with server.connected() as stubs:
        await _for_ever(lambda: call(stubs))


FLOODS: Final[dict[str, Callable[[Server], Coroutine[Any, Any, None]]]] = {
    flood.__name__: flood for flood in (reconnects, unfinished, oversized, streams, unread, refused, hurried, given_up)
}


def main() -> None:
    name, port, keys = sys.argv[1:]
    stay_here()
    os.nice(19)  # what it takes of this machine is not what it takes of the syncer
    print("begun", flush=True)
    asyncio.run(FLOODS[name](Server(int(port), Path(keys))))


if __name__ == "__main__":
    main()
