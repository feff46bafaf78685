"""A real syncer on a real socket, on a thread of its own, for callers that are not asynchronous."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager

from skerry import Tls
from skerry.net.loop_thread import LoopThread
from skerry_syncer.access.deny_list import DenyList
from skerry_syncer.server import ServerSettings, serving
from skerry_syncer.store.objects.opening import open_objects


@contextmanager
def syncer(
    tls: Tls | None = None,
    host: str = "127.0.0.1",
    store_url: str = "memory://",
    deny_list: DenyList | None = None,
) -> Iterator[str]:
    """Yields where a fresh syncer listens, an address of `host`; its store is empty unless `store_url` has one."""
    thread = LoopThread("syncer")
    stop = asyncio.Event()
    port = Future[int]()

    async def serve() -> None:
        settings = ServerSettings(listen=f"{host}:0", tls=tls, deny_list=deny_list)
        async with serving(open_objects(store_url), settings) as server:
            port.set_result(server.port)
            await stop.wait()

    served = thread.start(serve())
    try:
        yield f"{host}:{port.result(20)}"
    finally:
        thread.loop.call_soon_threadsafe(stop.set)
        served.result(20)
        thread.close()
