"""A real syncer on a real socket for the client's tests, on a thread of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from skerry.client.loop_thread import LoopThread
from skerry.store.objects.opening import open_objects
from skerry.syncer.server import ServerSettings, serving


@pytest.fixture
def target() -> Iterator[str]:
    """Where a fresh syncer with an empty store listens."""
    thread = LoopThread("syncer")
    stop = asyncio.Event()
    port: asyncio.Future[int] = asyncio.run_coroutine_threadsafe(_future(), thread.loop).result()

    async def serve() -> None:
        async with serving(open_objects("memory://"), ServerSettings(listen="127.0.0.1:0")) as server:
            port.set_result(server.port)
            await stop.wait()

    served = thread.start(serve())
    try:
        yield f"127.0.0.1:{thread.run(_result(port))}"
    finally:
        thread.loop.call_soon_threadsafe(stop.set)
        served.result(20)
        thread.close()


async def _future() -> asyncio.Future[int]:
    return asyncio.get_running_loop().create_future()


async def _result(future: asyncio.Future[int]) -> int:
    async with asyncio.timeout(20):
        return await future
