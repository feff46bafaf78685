"""A create whose outcome the store did not tell is found out, and no syncer begins where a name is created twice."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

import pytest

from skerry.runtime.clock import SystemClock
from skerry.runtime.identifiers import SystemEntropy
from skerry_syncer.server import ServerSettings, serving
from skerry_syncer.store.errors import StoreFullError, StoreUnavailableError, StoreURLError
from skerry_syncer.store.maintenance import options
from skerry_syncer.store.objects.interface import Objects
from skerry_syncer.store.objects.local import MARKER
from skerry_syncer.store.objects.opening import open_objects
from skerry_syncer.store.objects.put_if_absent import check_put_if_absent, create_or_read
from tests.e2e.azurite import AZURITE
from tests.support.dict_objects import DictObjects
from tests.support.heard_logs import heard_logs
from tests.support.hooked_objects import HookedObjects


class ForgetfulObjects(DictObjects):
    """Objects on a server that ignores `If-None-Match`."""

    async def create(self, name: str, data: bytes) -> None:
        self.objects.pop(name, None)
        await super().create(name, data)


async def start(objects: Objects) -> None:
    async with asyncio.timeout(30), serving(objects, ServerSettings(listen="127.0.0.1:0")):
        pass


async def test_a_store_that_creates_a_name_once_is_left_as_it_was(objects: Objects) -> None:
    await check_put_if_absent(objects, SystemEntropy())
    assert [info.name async for info in objects.list("") if info.name != MARKER] == []


async def test_a_store_that_creates_a_name_twice_is_refused_by_all_who_write(monkeypatch: pytest.MonkeyPatch) -> None:
    objects = ForgetfulObjects()
    monkeypatch.setattr(options, "open_objects", lambda *_, **__: objects)
    with pytest.raises(StoreURLError, match="If-None-Match"):
        await start(objects)
    with pytest.raises(StoreURLError, match="If-None-Match"):
        async with options.opened_store("s3://bucket", writes=True):
            pass
    async with options.opened_store("s3://bucket"):
        pass
    assert objects.objects == {}


async def test_a_syncer_waits_for_a_store_that_is_away_and_serves_one_that_is_full() -> None:
    failures = [StoreFullError("full"), StoreUnavailableError("away"), StoreUnavailableError("away")]
    objects = HookedObjects()

    async def fail() -> None:
        if failures:
            raise failures.pop()

    objects.hooks["before create", ""] = fail
    with heard_logs() as lines:
        await start(objects)
    assert [line["attempt"] for line in lines if "does not answer" in line["event"]] == [1, 2]


class LossyWay:
    """A way to a server that loses the next request, or the answer to it, and resets the connection."""

    def __init__(self, server: str) -> None:
        self.loses = ""
        self.lost_count = 0
        self._target = urlsplit(server)

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncIterator[str]:
        """Yields the URL of the way."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        async with server:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answers, behind = await asyncio.open_connection(self._target.hostname, self._target.port)
        await asyncio.gather(self._carry("request", reader, behind), self._carry("answer", answers, writer))
        behind.transport.abort()
        writer.transport.abort()

    async def _carry(self, kind: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(2**16):
                if kind == self.loses:
                    self.loses = ""
                    self.lost_count += 1
                    break
                writer.write(data)
                await writer.drain()
        writer.transport.abort()


@pytest.mark.parametrize("kind", ["s3", "gs", pytest.param("az", marks=AZURITE)])
@pytest.mark.parametrize("lost", ["request", "answer"])
@pytest.mark.parametrize("first", [b"mine", b"theirs"])
async def test_a_create_whose_request_or_answer_is_lost_returns_what_the_name_has(
    kind: str, lost: str, first: bytes, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    variable = {"s3": "AWS_ENDPOINT_URL_S3", "gs": "GOOGLE_BASE_URL", "az": "AZURITE_BLOB_STORAGE_URL"}[kind]
    url = request.getfixturevalue(f"{kind}_url")
    server = open_objects(url)
    if first == b"theirs":
        await server.create("log/1", first)
    way = LossyWay(os.environ.get(variable) or os.environ["AWS_ENDPOINT_URL"])
    async with way.opened() as address:
        monkeypatch.setenv(variable, address)
        objects = open_objects(url)
        await objects.folders("")  # so that a connection is open and a token is there
        way.loses = lost
        stored = await create_or_read(objects, "log/1", b"mine", clock=SystemClock(), entropy=SystemEntropy())
    assert stored == await server.get("log/1") == first
    assert way.lost_count == 1
