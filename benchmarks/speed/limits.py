"""What a transfer and a write can reach at best here: a raw gRPC stream, and a file that is written and synced."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import grpc

from benchmarks.dialogue import Dialogue

_METHOD: Final = "/benchmark.Raw/"
MESSAGE_BYTES: Final = 2**20
_WRITE_BYTES: Final = 4 * 2**20


def write_and_sync(folder: Path, size_bytes: int) -> None:
    """Writes a file of `size_bytes`, syncs and removes it; its bytes can't be compressed."""
    path, piece = folder / "limit", os.urandom(_WRITE_BYTES)
    with path.open("wb", buffering=0) as file:
        for at in range(0, size_bytes, _WRITE_BYTES):
            file.write(piece[: size_bytes - at])
        os.fsync(file.fileno())
    path.unlink()


class RawStream:
    """A gRPC server in another process that does nothing with what it gets, and sends what it is asked for."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        """Calls over `channel`; messages are plain bytes of 1 MiB."""
        self._push = channel.stream_unary(f"{_METHOD}Push", None, None)
        self._pull = channel.unary_stream(f"{_METHOD}Pull", None, None)

    async def push(self, size_bytes: int) -> None:
        """Sends bytes and waits for the answer."""
        message = os.urandom(MESSAGE_BYTES)

        async def messages() -> AsyncIterator[bytes]:
            for at in range(0, size_bytes, MESSAGE_BYTES):
                yield message[: size_bytes - at]

        await self._push(messages())

    async def pull(self, size_bytes: int) -> None:
        """Receives bytes."""
        async for _ in self._pull(str(size_bytes).encode()):
            pass


class _Handler(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # generic in its stubs alone
    def service(self, details: Any) -> Any:
        method = details.method.removeprefix(_METHOD)
        if method == "Push":
            return grpc.stream_unary_rpc_method_handler(_take)
        return grpc.unary_stream_rpc_method_handler(_give) if method == "Pull" else None


async def _take(requests: AsyncIterator[bytes], _context: Any) -> bytes:
    async for _ in requests:
        pass
    return b""


async def _give(request: bytes, _context: Any) -> AsyncIterator[bytes]:
    size_bytes, message = int(request), os.urandom(MESSAGE_BYTES)
    for at in range(0, size_bytes, MESSAGE_BYTES):
        yield message[: size_bytes - at]


async def _serve() -> None:
    server = grpc.aio.server()
    server.add_generic_rpc_handlers([_Handler()])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    Dialogue().answer(port=port)
    await server.wait_for_termination()


async def timed(action: Callable[[], Awaitable[object]]) -> float:
    """Returns the seconds that the action took."""
    loop = asyncio.get_running_loop()
    start_s = loop.time()
    await action()
    return loop.time() - start_s


if __name__ == "__main__":
    sys.exit(asyncio.run(_serve()))
