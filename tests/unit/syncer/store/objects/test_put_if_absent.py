"""A syncer does not begin on a store that breaks the promise it is built on, and waits for one that is away."""

from __future__ import annotations

import asyncio

import pytest

from skerry.runtime.identifiers import SystemEntropy
from skerry_syncer.server import ServerSettings, serving
from skerry_syncer.store.errors import StoreFullError, StoreUnavailableError, StoreURLError
from skerry_syncer.store.maintenance import options
from skerry_syncer.store.objects.interface import Objects
from skerry_syncer.store.objects.local import MARKER
from skerry_syncer.store.objects.put_if_absent import check_put_if_absent
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
