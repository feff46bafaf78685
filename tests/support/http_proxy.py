"""A reverse proxy before a syncer: it relays connections, or answers every call itself with an HTTP status."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.support.http2 import http2
from tests.support.tcp_link import Link

_HEADERS, _SETTINGS, _PING = 1, 4, 6
_ACK, _END_STREAM, _END_HEADERS = 1, 1, 4


class HttpProxy(Link):
    """Relays to `target` while `status` is None."""

    def __init__(self, target: str) -> None:
        super().__init__(int(target.rpartition(":")[2]))
        self.status: int | None = None
        self.answered_count = 0

    def answer(self, status: int | None) -> None:
        """Answers with `status` from now on, or relays again; open connections break."""
        self.status = status
        self.reset()

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        """Accepts connections while the context lasts."""
        await self.open(0)
        try:
            yield
        finally:
            await self.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.status is None:
            await super()._serve(reader, writer)
            return
        self._writers.add(writer)
        try:
            await self._answer(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            return
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Speaks as much HTTP/2 as it takes to end each stream with the status."""
        await reader.readuntil(b"SM\r\n\r\n")
        writer.write(http2(_SETTINGS, 0, 0, b""))
        while True:
            head = await reader.readexactly(9)
            size, kind, flags = int.from_bytes(head[:3]), head[3], head[4]
            stream = int.from_bytes(head[5:]) & 0x7FFFFFFF
            payload = await reader.readexactly(size)
            if kind in {_SETTINGS, _PING} and not flags & _ACK:
                writer.write(http2(kind, _ACK, 0, payload if kind == _PING else b""))
            elif kind == _HEADERS:
                self.answered_count += 1
                # HPACK: a literal, whose name is entry 8 of the static table, ":status".
                header = b"\x08\x03" + str(self.status).encode()
                writer.write(http2(_HEADERS, _END_STREAM | _END_HEADERS, stream, header))
