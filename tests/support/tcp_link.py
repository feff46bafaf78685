"""A TCP link between a client and a server that can be cut, half-open, slow and far."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field

_CHUNK_BYTES = 16 * 1024


@dataclass(eq=False)
class Link:
    """One way from a port to a port behind it, and what is wrong with it."""

    target_port: int
    port: int = 0
    is_cut: bool = False  # connections are reset, and no new one is taken
    bytes_per_s: float = float("inf")
    delay_s: float = 0.0  # each way
    _flowing: asyncio.Event = field(default_factory=asyncio.Event)
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)
    _server: asyncio.Server | None = None
    _frozen: list[asyncio.Event] = field(default_factory=list)  # those that half-open connections wait for

    async def open(self, port: int) -> None:
        """Listens on a port of loopback."""
        self._flowing.set()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port, limit=_CHUNK_BYTES)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Stops listening and resets every connection."""
        if self._server is not None:
            self._server.close()
        self.reset()

    def cut(self) -> None:
        """Resets every connection, and those that come."""
        self.is_cut = True
        self.reset()

    def freeze(self) -> None:
        """Makes the connections that there are half-open: nothing arrives any more, and neither end is told."""
        self._flowing.clear()
        self._frozen.append(self._flowing)
        self._flowing = asyncio.Event()
        self._flowing.set()

    def swallow(self) -> None:
        """Likewise, and connections that are made from now on are no better."""
        self._flowing.clear()
        self._frozen.append(self._flowing)

    def slow_down(self, bytes_per_s: float, delay_s: float) -> None:
        """Carries fewer bytes, and each of them late."""
        self.bytes_per_s, self.delay_s = bytes_per_s, delay_s

    def heal(self) -> None:
        """Ends every fault. Connections that were half-open are reset."""
        if self._frozen:
            self.reset()
        for flowing in self._frozen:
            flowing.set()
        self._frozen.clear()
        self.is_cut = False
        self.bytes_per_s, self.delay_s = float("inf"), 0.0

    def reset(self) -> None:
        """Resets every connection."""
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        behind: asyncio.StreamWriter | None = None
        try:
            if self.is_cut:
                return
            answers, behind = await asyncio.open_connection("127.0.0.1", self.target_port, limit=_CHUNK_BYTES)
            self._writers.add(behind)
            ways, flowing = ((reader, behind), (answers, writer)), self._flowing
            pumps = [asyncio.create_task(self._pump(*ends, flowing)) for ends in ways]
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for pump in pumps:
                    pump.cancel()
                await asyncio.wait(pumps)
        except OSError:
            return
        finally:
            for end in filter(None, (writer, behind)):
                self._writers.discard(end)
                end.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, flowing: asyncio.Event) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(_CHUNK_BYTES):
                await asyncio.sleep(self.delay_s + len(data) / self.bytes_per_s)
                await flowing.wait()
                writer.write(data)
                await writer.drain()
