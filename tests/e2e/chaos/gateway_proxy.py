"""An HTTP proxy between a replica, in whose process it is, and an S3 gateway; a `Board` says which requests it strikes.

Requests pass unchanged, so their signatures hold; requests and answers are of a few kB here, and are read as a whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from typing import NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

from tests.e2e.chaos.points import Board, Deed, Moment, Operation, Strike, operation_of

_REFUSED = b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
_FULL = b"HTTP/1.1 507 Insufficient Storage\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
# As rare as a broken pipe in a request is in practice, and as often as not a proxy answers for the gateway.
_CUT_SHARE = 0.5


class _Message(NamedTuple):
    """A request or an answer as its bytes."""

    head: bytes
    body: bytes

    @property
    def first_line(self) -> str:
        """The request line or the status line."""
        return self.head.partition(b"\r\n")[0].decode("latin-1")

    def header(self, name: str) -> str:
        """Returns a header's value, or the empty string."""
        for line in self.head.split(b"\r\n")[1:]:
            key, _, value = line.partition(b":")
            if key.strip().lower() == name.encode():
                return value.strip().decode("latin-1")
        return ""


class GatewayProxy:
    """Listens for its own process, as long as that lives."""

    def __init__(self, gateway_port: int, board: Board) -> None:
        self._gateway_port = gateway_port
        self._board = board
        self._server: asyncio.Server | None = None

    async def open(self) -> int:
        """Listens on a free port, and returns it."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=2**20)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        behind: asyncio.StreamWriter | None = None
        try:
            answers, behind = await asyncio.open_connection("127.0.0.1", self._gateway_port, limit=2**20)
            while (request := await _read(reader)) is not None:
                await asyncio.sleep(self._board.pause_s())
                strike = self._board.strike(_operation(request))
                if strike is not None:
                    await self._struck(strike, request, answers, behind, writer)
                    return
                await _send(behind, request)
                answer = await _read(answers, has_body=not request.head.startswith(b"HEAD"))
                if answer is None:
                    return
                await _send(writer, answer)
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            return
        finally:
            for one in filter(None, (writer, behind)):
                with contextlib.suppress(OSError):
                    one.close()

    async def _struck(
        self,
        strike: Strike,
        request: _Message,
        answers: asyncio.StreamReader,
        behind: asyncio.StreamWriter,
        writer: asyncio.StreamWriter,
    ) -> None:
        """Lets as much of the request happen as the strike says, and has its sender hear an error, or nothing more."""
        is_read = request.head.startswith(b"GET")
        answer: _Message | None = None
        if strike.moment is Moment.AFTER or (strike.moment is Moment.TORN and is_read):
            await _send(behind, request)
            answer = await _read(answers, has_body=not request.head.startswith(b"HEAD"))
        elif strike.moment is Moment.TORN:
            behind.write(request.head + request.body[: len(request.body) // 2])
            await behind.drain()
            behind.transport.abort()
        if strike.deed is Deed.KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        elif strike.moment is Moment.TORN and answer is not None:
            writer.write(answer.head + answer.body[: len(answer.body) // 2])
            await writer.drain()
        elif strike.is_full or self._board.source.random() >= _CUT_SHARE:
            writer.write(_FULL if strike.is_full else _REFUSED)
            await writer.drain()


async def _send(writer: asyncio.StreamWriter, message: _Message) -> None:
    writer.write(message.head + message.body)
    await writer.drain()


async def _read(reader: asyncio.StreamReader, *, has_body: bool = True) -> _Message | None:
    """Returns the next message; None at the connection's end."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    found = _Message(head, b"")
    if not has_body or found.first_line.split()[1] in {"204", "304"}:
        return found
    if found.header("transfer-encoding").lower() == "chunked":
        return _Message(head, await _chunks(reader))
    return _Message(head, await reader.readexactly(int(found.header("content-length") or 0)))


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    """Returns a chunked body as it came, with its framing."""
    body = bytearray()
    while True:
        line = await reader.readuntil(b"\r\n")
        size = int(line.split(b";")[0], 16)
        body += line + await reader.readexactly(size + 2)
        if size == 0:
            return bytes(body)


def _operation(request: _Message) -> Operation:
    """Returns what the replica does, in the words of the store's interface where HTTP tells them apart."""
    method, target, _ = request.first_line.split(" ", 2)
    parts = urlsplit(target)
    query = parse_qs(parts.query, keep_blank_values=True)
    if "list-type" in query:
        prefix = query.get("prefix", [""])[0]
        return operation_of("folders" if "delimiter" in query else "list", _below_root(prefix))
    if "delete" in query:
        name = request.body.partition(b"<Key>")[2].partition(b"</Key>")[0].decode()
        return operation_of("delete", _below_root(name))
    verb = {"GET": "get", "HEAD": "head", "DELETE": "delete", "POST": "post"}.get(method, "write")
    if method == "PUT" and request.header("if-none-match"):
        verb = "create"
    return operation_of(verb, _below_root(unquote(parts.path)))


def _below_root(path: str) -> str:
    """Returns a name without the bucket and the store's prefix."""
    _, found, rest = path.partition("runs/")
    return f"runs/{rest}" if found else path.rpartition("/")[2]
