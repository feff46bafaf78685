"""Roles, by the certificates of real connections."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from skerry import Tls
from skerry.v1 import runs_pb2 as runs
from skerry.v1 import types_pb2 as types
from skerry.wire.identity import Identity
from skerry_syncer.access.deny_list import DenyList
from skerry_syncer.server import ServerSettings, SyncerServer, serving
from skerry_syncer.store.log.entries import INITIAL_BASE, PolicyItem, RollbackItem, StatusItem
from skerry_syncer.store.objects.opening import open_objects
from tests.integration.syncer.conftest import LOCAL
from tests.support.heard_logs import heard_logs
from tests.support.made_keys import make_keys, tls_of
from tests.support.raw_learner import RawLearner, attached, connected, create_run, delta_values, pull, refused
from tests.support.still_clock import StillClock
from tests.unit.syncer.access.test_roles import CALLERS, ID

ADMIN, LEARNER, OF_THE_RUN = CALLERS["admin"], CALLERS["learner"], CALLERS["learner of the run"]
Certificates = Callable[[Identity | None], Tls]


def denied() -> AbstractContextManager[object]:
    return refused("PERMISSION_DENIED", grpc.StatusCode.PERMISSION_DENIED)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """An authority, a server's certificate, and one of every caller but nobody."""
    learners = ("--learner", "us", "--learner", "demo/us", "--learner", "demo/eu")
    make_keys(tmp_path / "keys", "--server", "a.example", *learners, "--reader", "prom", "--admin", "anna")
    return tmp_path / "keys"


@asynccontextmanager
async def by_certificate(
    keys: Path, settings: ServerSettings = LOCAL
) -> AsyncIterator[tuple[SyncerServer, Certificates]]:
    """Yields a server, and what a caller connects with; nobody has a server's certificate, which names no client."""

    def tls(caller: Identity | None) -> Tls:
        own = None if caller is None else f"{caller.run}{'.' if caller.run else ''}{caller.name}"
        return tls_of(keys, own or "a.example")

    async with serving(open_objects("memory://"), replace(settings, tls=tls_of(keys, "a.example"))) as server:
        yield server, tls


async def test_a_learner_speaks_for_itself_and_whose_call_was_refused_is_logged(keys: Path) -> None:
    with heard_logs() as lines:
        async with (
            by_certificate(keys) as (server, tls),
            connected(server.port, tls(LEARNER)) as ours,
            connected(server.port, tls(CALLERS["another learner of the run"])) as theirs,
        ):
            run, _ = await create_run(ours)  # which says "creator"
            deltas = (await server.host.open("demo")).state.deltas.values()
            first = {delta.item.learner for delta in deltas if delta.item.base_version == INITIAL_BASE}
            assert first == {"us"}
            learner = await attached(ours, run, "us")
            liar = RawLearner(theirs, run, "us", random.Random(2), session=learner.session)
            with denied():
                await liar.push(liar.header(await pull(theirs, run, "body"), "body"), delta_values())
            await learner.advance()
    (refusal,) = [line for line in lines if line["event"] == "call refused"]
    assert (refusal["reason"], refusal["identity"]) == ("PERMISSION_DENIED", "skerry://learner/demo/eu")


async def test_the_log_says_who_changed_a_run(keys: Path) -> None:
    async with by_certificate(keys) as (server, tls), connected(server.port, tls(ADMIN)) as stubs:
        run, _ = await create_run(stubs)
        policy = types.Policy(quorum_count=2)
        await stubs.runs.SetPolicy(runs.SetPolicyRequest(request_id=ID, name="demo", policy=policy))
        await stubs.runs.RollBack(runs.RollBackRequest(request_id="b" * 32, name="demo", target_position=run.position))
        await stubs.runs.CloseRun(runs.CloseRunRequest(name="demo"))
        log = (await server.host.open("demo")).log
        authors = [
            (type(item).__name__, item.author)
            async for entry, _ in log.entries()
            for item in entry.items
            if isinstance(item, PolicyItem | StatusItem | RollbackItem)
        ]
    names = ("PolicyItem", "StatusItem", "PolicyItem", "RollbackItem", "StatusItem")
    assert authors == [*((name, str(ADMIN)) for name in names), ("StatusItem", "")]  # that all is merged


async def test_a_run_can_want_learners_that_were_enrolled_in_it(keys: Path) -> None:
    async with (
        by_certificate(keys) as (server, tls),
        connected(server.port, tls(ADMIN)) as admin,
        connected(server.port, tls(LEARNER)) as anywhere,
        connected(server.port, tls(OF_THE_RUN)) as here,
    ):
        run, _ = await create_run(admin)
        learner = await attached(anywhere, run, "us")
        header = learner.header(await pull(anywhere, run, "body"), "body")
        policy = types.Policy(enrols_by_run=True)
        await admin.runs.SetPolicy(runs.SetPolicyRequest(request_id=ID, name="demo", policy=policy))
        for call in (learner.push(header, delta_values()), learner.attach()):
            with denied():
                await call
        await attached(here, run, "us")


async def _open_to(port: int, tls: Tls) -> list[grpc.StatusCode]:
    """Returns what a caller gets from health and from reflection."""
    methods = ("grpc.health.v1.Health/Check", "grpc.reflection.v1.ServerReflection/ServerReflectionInfo")
    async with connected(port, tls) as stubs:
        calls = [stubs.channel.stream_unary(f"/{method}", None, None)(iter([b""]), timeout=20) for method in methods]
        return [await call.code() for call in calls]


async def test_health_can_be_closed_to_strangers_and_reflection_turned_off(keys: Path) -> None:
    ok, unknown, off = grpc.StatusCode.OK, grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNIMPLEMENTED
    for is_open, stranger, reader in ((True, [ok, unknown], [ok, ok]), (False, [unknown, off], [ok, off])):
        settings = replace(LOCAL, has_open_health=is_open, has_reflection=is_open)
        async with by_certificate(keys, settings) as (server, tls):
            assert await _open_to(server.port, tls(None)) == stranger
            assert await _open_to(server.port, tls(CALLERS["reader"])) == reader


async def test_a_client_on_the_deny_list_is_refused_and_its_streams_end(keys: Path, tmp_path: Path) -> None:
    file, clock = tmp_path / "denied", StillClock()
    file.write_text("# nobody yet\n")
    settings = replace(LOCAL, deny_list=DenyList(file, clock))
    async with (
        by_certificate(keys, settings) as (server, tls),
        connected(server.port, tls(LEARNER)) as ours,
        connected(server.port, tls(OF_THE_RUN)) as theirs,
    ):
        run, _ = await create_run(ours)
        learner = await attached(ours, run, "us")
        file.write_text("skerry://learner/us  # left the team\n")
        clock.now_s += 2
        with denied():
            await pull(ours, run, "body")
        await learner.report()
        with denied():
            await learner.event("draining")
        await attached(theirs, run, "us")
