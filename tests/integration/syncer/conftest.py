"""Fixtures: a syncer in this process with a real socket and a real folder, and a connection to it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from skerry.v1 import types_pb2 as types
from skerry_syncer.run.host import HostSettings
from skerry_syncer.server import ServerSettings, SyncerServer, serving
from skerry_syncer.store.objects.opening import open_objects
from tests.support import heard_logs
from tests.support.raw_learner import RawLearner, Stubs, attached, connected, create_run

LOCAL = ServerSettings(listen="127.0.0.1:0", host=HostSettings(sweep_s=0.2, name_lifetime_s=0.1))


@pytest.fixture(autouse=True)
def quiet_logs() -> None:
    """Silences logs: a failed assertion says what it needs without them."""
    heard_logs.quiet_logs()


@pytest.fixture
def store_url(tmp_path: Path) -> str:
    return (tmp_path / "store").as_uri()


@pytest.fixture
async def server(store_url: str) -> AsyncIterator[SyncerServer]:
    async with serving(open_objects(store_url), LOCAL) as started:
        yield started


@pytest.fixture
async def stubs(server: SyncerServer) -> AsyncIterator[Stubs]:
    async with connected(server.port) as open_stubs:
        yield open_stubs


@pytest.fixture
async def run(stubs: Stubs) -> types.Run:
    return (await create_run(stubs))[0]


@pytest.fixture
async def learner(stubs: Stubs, run: types.Run) -> RawLearner:
    return await attached(stubs, run)
