"""A syncer does not begin on a store that breaks the promise it is built on, refuses it, or does not answer."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from moto import settings as moto_settings

from skerry.runtime.clock import SystemClock
from skerry_syncer.command import serve
from skerry_syncer.server import ServerSettings, serving
from skerry_syncer.store.errors import StoreFullError, StoreUnavailableError, StoreURLError
from skerry_syncer.store.maintenance.collecting import gc
from skerry_syncer.store.maintenance.reading import log
from skerry_syncer.store.objects.interface import Objects
from skerry_syncer.store.objects.opening import open_objects
from tests.support.dict_objects import DictObjects
from tests.support.faulty_objects import NO_FAULT, Effect, Fault, FaultyObjects, LateWrites
from tests.support.heard_logs import heard_logs
from tests.support.s3_relay import S3Relay, s3_relay

SETTINGS = ServerSettings(listen="127.0.0.1:0")


@pytest.fixture
def relay(s3_options: dict[str, str]) -> Iterator[S3Relay]:
    with s3_relay(s3_options["endpoint"]) as relay:
        yield relay


@pytest.fixture
def url(relay: S3Relay, s3_options: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> str:
    """An empty prefix behind the relay, whose credentials the environment has, as a person would have it."""
    for name, value in s3_options.items():
        monkeypatch.setenv(f"AWS_{name.upper()}", value)
    for name in ("AWS_ENDPOINT", "AWS_ENDPOINT_URL"):
        monkeypatch.setenv(name, relay.endpoint)
    return f"s3://skerry-test/{os.getpid()}-{random.getrandbits(32):x}"


async def names_in(objects: Objects) -> list[str]:
    return [info.name async for info in objects.list("")]


async def start(objects: Objects) -> None:
    async with asyncio.timeout(30), serving(objects, SETTINGS):
        pass


async def test_a_syncer_begins_on_a_store_that_creates_a_name_once_and_leaves_nothing(objects: Objects) -> None:
    await start(objects)
    assert [name for name in await names_in(objects) if name != "skerry.store"] == []


async def test_a_syncer_refuses_a_server_that_creates_a_name_twice(url: str, relay: S3Relay) -> None:
    relay.ignores_conditions = True
    objects = open_objects(url)
    with pytest.raises(StoreURLError, match="If-None-Match"):
        await start(objects)
    assert await names_in(objects) == []


def test_a_command_that_writes_refuses_it_too_and_those_that_read_do_not_ask(url: str, relay: S3Relay) -> None:
    relay.ignores_conditions = True
    words = ["--store", url, "none"]
    assert isinstance(CliRunner().invoke(gc, [*words, "--yes"]).exception, StoreURLError)
    relay.requests.clear()
    for reading in (gc, log):
        CliRunner().invoke(reading, words)
    assert {method for method, _, _ in relay.requests} <= {"GET", "HEAD"}


def test_wrong_credentials_end_a_syncer_with_what_the_store_said(
    url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(moto_settings, "INITIAL_NO_AUTH_ACTION_COUNT", 0.0)  # from now on they are checked
    result = CliRunner().invoke(serve, ["--listen", "127.0.0.1:0", "--store", url, "--scratch", str(tmp_path)])
    assert result.exit_code == 2
    assert "refuses the credentials" in result.output
    assert "InvalidAccessKeyId" in result.output


async def test_a_syncer_says_that_the_store_does_not_answer_and_begins_when_it_does() -> None:
    failures = [StoreUnavailableError, StoreUnavailableError]

    def weather(operation: str, _name: str) -> Fault:
        return Fault(Effect.ERROR_BEFORE, failures.pop()) if operation == "create" and failures else NO_FAULT

    objects = FaultyObjects(DictObjects(), weather, clock=SystemClock(), late=LateWrites())
    with heard_logs() as lines:
        await start(objects)
    assert [line["attempt"] for line in lines if "does not answer" in line["event"]] == [1, 2]


async def test_a_full_store_is_served_so_that_room_can_be_made() -> None:
    full = Fault(Effect.ERROR_BEFORE, StoreFullError)
    objects = FaultyObjects(
        DictObjects(),
        lambda operation, _name: full if operation == "create" else NO_FAULT,
        clock=SystemClock(),
        late=LateWrites(),
    )
    await start(objects)
