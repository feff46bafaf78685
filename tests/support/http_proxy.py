"""A reverse proxy before a syncer: it relays connections, or answers every call itself with an HTTP status."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_HEADERS, _SETTINGS, _PING = 1, 4, 6
_ACK, _END_STREAM, _END_HEADERS = 1, 1, 4


class HttpProxy:
    """Relays to `target` while `status` is None."""

    def __init__(self, target: str) -> None:
        self.port = 0
        self.status: int | None = None
        self.answered_count = 0
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self._connections: set[asyncio.StreamWriter] = set()

    def answer(self, status: int | None) -> None:
        """Answers with `status` from now on, or relays again; open connections break."""
        self.status = status
        for writer in list(self._connections):
            writer.close()

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        """Accepts connections while the context lasts."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield
        finally:
            server.close()
            self.answer(None)
            await server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.add(writer)
        try:
            if self.status is not None:
                await self._answer(reader, writer)
                return
            onward = await asyncio.open_connection(self._host, self._port)
            self._connections.add(onward[1])
            try:
                await asyncio.gather(_copy(reader, onward[1]), _copy(onward[0], writer))
            finally:
                self._connections.discard(onward[1])
        except (ConnectionError, asyncio.IncompleteReadError):
            return
        finally:
            self._connections.discard(writer)
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Speaks as much HTTP/2 as it takes to end each stream with the status."""
        await reader.readexactly(len(_PREFACE))
        writer.write(_frame(_SETTINGS, 0, 0))
        while True:
            head = await reader.readexactly(9)
            size, kind, flags = int.from_bytes(head[:3]), head[3], head[4]
            stream = int.from_bytes(head[5:]) & 0x7FFFFFFF
            payload = await reader.readexactly(size)
            if kind in {_SETTINGS, _PING} and not flags & _ACK:
                writer.write(_frame(kind, _ACK, 0, payload if kind == _PING else b""))
            elif kind == _HEADERS:
                self.answered_count += 1
                # HPACK: a literal, whose name is entry 8 of the static table, ":status".
                header = b"\x08\x03" + str(self.status).encode()
                writer.write(_frame(_HEADERS, _END_STREAM | _END_HEADERS, stream, header))


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3) + struct.pack(">BBI", kind, flags, stream) + payload


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(2**16):
            writer.write(data)
            await writer.drain()
    finally:
        writer.close()
