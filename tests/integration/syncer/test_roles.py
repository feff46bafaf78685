"""Roles, by the certificates of real connections."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from skerry import Tls
from skerry.cli.authority import Wanted
from skerry.v1 import exchange_pb2 as exchange
from skerry.v1 import runs_pb2 as runs
from skerry.v1 import types_pb2 as types
from skerry.wire.identity import Identity, Role
from skerry_syncer.access.deny_list import DenyList
from skerry_syncer.server import ServerSettings, SyncerServer, serving
from skerry_syncer.store.log.entries import INITIAL_BASE
from skerry_syncer.store.log.state import Outcome
from skerry_syncer.store.maintenance.reading import entry_lines
from skerry_syncer.store.objects.opening import open_objects
from tests.integration.syncer.conftest import LOCAL
from tests.support.heard_logs import heard_logs
from tests.support.made_keys import make_keys, make_pair, tls_of
from tests.support.raw_learner import (
    RawLearner,
    Stubs,
    attached,
    connected,
    create_run,
    delta_values,
    pull,
    refusal_of,
    refused,
)
from tests.support.still_clock import StillClock
from tests.unit.syncer.access.test_roles import CALLERS, ID, METHODS, REQUESTS

ADMIN = CALLERS["admin"]


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """An authority, a server's certificate, and one of every caller but nobody."""
    words = ["--learner", "us", "--learner", "demo/us", "--learner", "demo/eu", "--learner", "gpt/us"]
    make_keys(tmp_path / "keys", "--server", "a.example", *words, "--reader", "prom", "--admin", "anna")
    return tmp_path / "keys"


@asynccontextmanager
async def by_certificate(
    keys: Path, settings: ServerSettings = LOCAL
) -> AsyncIterator[tuple[SyncerServer, Callable[[Identity | None], Tls]]]:
    """Yields a server, and what a caller connects with; nobody has a server's certificate, which names no client."""

    def tls(caller: Identity | None) -> Tls:
        own = None if caller is None else f"{caller.run}{'.' if caller.run else ''}{caller.name}"
        return tls_of(keys, own or "a.example")

    async with serving(open_objects("memory://"), replace(settings, tls=tls_of(keys, "a.example"))) as server:
        yield server, tls


async def asked(stubs: Stubs, method: str, request: Any) -> str:
    """Returns the reason with which a call is refused; empty if it is answered."""
    service, _, name = method.partition("/")
    call = getattr(getattr(stubs, service.lower()), name)
    streams = METHODS[method].client_streaming, METHODS[method].server_streaming
    running = call(iter([request]) if streams[0] else request, timeout=20)
    try:
        if streams[1]:
            await running.read()
            if running.done() and await running.code() is not grpc.StatusCode.OK:
                await running.read()
        else:
            await running
    except grpc.aio.AioRpcError as error:
        return refusal_of(error).reason
    finally:
        running.cancel()
    return ""


@pytest.mark.parametrize("who", ["learner", "learner of the run", "learner of another run", "admin"])
async def test_a_stream_that_begins_with_any_message_is_refused_as_its_callers_fault(who: str, keys: Path) -> None:
    caller = CALLERS[who]
    kinds: dict[str, Any] = {"Exchange/PushDelta": exchange.PushDeltaRequest}
    if caller.role is Role.LEARNER:  # an admin's is refused before it is read
        kinds["Exchange/Attach"] = exchange.AttachRequest
    async with by_certificate(keys) as (server, tls), connected(server.port, tls(caller)) as stubs:
        for method, kind in kinds.items():
            for field in kind.DESCRIPTOR.fields:
                message = kind()
                if field.message_type is None:
                    setattr(message, field.name, b"weights")
                else:
                    getattr(message, field.name).SetInParent()
                reason = await asked(stubs, method, message)
                assert reason in {"PERMISSION_DENIED", "BAD_REQUEST", "BAD_NAME"}, (method, field.name)


async def test_without_a_client_authority_everybody_may_do_everything(keys: Path) -> None:
    settings = replace(LOCAL, tls=tls_of(keys, "a.example", ca=False))
    async with (
        serving(open_objects("memory://"), settings) as server,
        connected(server.port, tls_of(keys)) as stubs,
    ):
        for method, request in REQUESTS.items():
            assert await asked(stubs, method, request) not in {"UNAUTHENTICATED", "PERMISSION_DENIED"}, method


async def test_nobody_fences_or_pushes_for_another_learner(keys: Path) -> None:
    async with (
        by_certificate(keys) as (server, tls),
        connected(server.port, tls(CALLERS["learner"])) as ours,
        connected(server.port, tls(CALLERS["another learner of the run"])) as theirs,
    ):
        run, _ = await create_run(ours)  # which says "creator"
        state = (await server.host.open("demo")).state
        first = [delta.item for delta in state.deltas.values() if delta.item.base_version == INITIAL_BASE]
        assert {item.learner for item in first} == {"us"}
        learner = await attached(ours, run, "us")
        liar = RawLearner(theirs, run, "us", random.Random(2), session=learner.session)
        base = await pull(theirs, run, "body")
        for call in (liar.attach(), liar.push(liar.header(base, "body"), base.values)):
            with refused("PERMISSION_DENIED", grpc.StatusCode.PERMISSION_DENIED):
                await call
        await learner.report()
        await learner.advance()


async def test_a_session_id_is_in_no_answer_and_no_event(keys: Path) -> None:
    async with by_certificate(keys) as (server, tls), connected(server.port, tls(CALLERS["learner"])) as stubs:
        run, _ = await create_run(stubs)
        learner = RawLearner(stubs, run, "us", random.Random(1))
        heard = [(await learner.attach()).SerializeToString()]
        await learner.report()
        await learner.leave()
        seen = (await stubs.runs.GetRun(runs.GetRunRequest(name="demo"))).learners
        assert [one.learner_id for one in seen] == ["us"]
        heard.append(b"".join(one.SerializeToString() for one in seen))
        watch = stubs.exchange.Watch(exchange.WatchRequest(run="demo", after_position=1), timeout=20)
        async for answer in watch:
            heard.append(answer.SerializeToString())
            if answer.event.HasField("learner") and not answer.event.learner.is_live:
                break
        watch.cancel()
        assert b"us" in heard[-1]
        assert [one for one in heard if learner.session.encode() in one] == []


async def test_a_learner_and_an_admin_create_runs_but_a_learner_of_one_run_only_that_one(keys: Path) -> None:
    async with by_certificate(keys) as (server, tls):
        for who, name in (("admin", "one"), ("learner", "two"), ("learner of the run", "demo")):
            async with connected(server.port, tls(CALLERS[who])) as stubs:
                await create_run(stubs, name)
        async with connected(server.port, tls(CALLERS["learner of another run"])) as stubs:
            with refused("PERMISSION_DENIED", grpc.StatusCode.PERMISSION_DENIED):
                await create_run(stubs, "three")


async def test_the_log_says_who_changed_a_run(keys: Path) -> None:
    async with by_certificate(keys) as (server, tls), connected(server.port, tls(ADMIN)) as stubs:
        run, _ = await create_run(stubs)
        policy = types.Policy(quorum_count=2)
        await stubs.runs.SetPolicy(runs.SetPolicyRequest(request_id=ID, name="demo", policy=policy))
        await stubs.runs.RollBack(runs.RollBackRequest(request_id="b" * 32, name="demo", target_position=run.position))
        async with connected(server.port, tls(CALLERS["learner"])) as own:
            await RawLearner(own, run, "us", random.Random(1)).attach()
        await stubs.runs.CloseRun(runs.CloseRunRequest(name="demo"))
        log = (await server.host.open("demo")).log
        rows = [
            row
            async for entry, _ in log.entries()
            for row in entry_lines(entry, tuple(Outcome(item, None) for item in entry.items))
        ]
    by = [(kind, what.partition(", by ")[2]) for *_, kind, what, _ in rows if kind in AUTHORED]
    anna = "skerry://admin/anna"
    assert by == [
        *(("policy", anna), ("status", anna)),
        *(("policy", anna), ("rollback", anna), ("status", anna), ("status", "")),  # that all is merged
    ]


AUTHORED = {"policy", "status", "rollback"}


async def test_a_run_can_want_learners_that_were_enrolled_in_it(keys: Path) -> None:
    async with (
        by_certificate(keys) as (server, tls),
        connected(server.port, tls(ADMIN)) as admin,
        connected(server.port, tls(CALLERS["learner"])) as anywhere,
        connected(server.port, tls(CALLERS["learner of the run"])) as here,
    ):
        run, _ = await create_run(admin)
        learner = await attached(anywhere, run, "us")
        header = learner.header(await pull(anywhere, run, "body"), "body")
        policy = types.Policy(enrols_by_run=True)
        await admin.runs.SetPolicy(runs.SetPolicyRequest(request_id=ID, name="demo", policy=policy))
        for call in (learner.push(header, delta_values()), learner.attach()):
            with refused("PERMISSION_DENIED", grpc.StatusCode.PERMISSION_DENIED):
                await call
        await attached(here, run, "us")


async def _first(call: Any) -> grpc.StatusCode:
    """Returns OK if a first answer came, else why not; ends the call."""
    try:
        await call.read()
        return await call.code() if call.done() else grpc.StatusCode.OK
    except grpc.aio.AioRpcError as error:
        return error.code()
    finally:
        call.cancel()


async def _open_to(port: int, tls: Tls) -> list[grpc.StatusCode]:
    """Returns what a caller gets from `Check`, from `Watch` and from reflection."""
    request = health_pb2.HealthCheckRequest()
    question = reflection_pb2.ServerReflectionRequest(list_services="")
    async with connected(port, tls) as stubs:
        health = health_pb2_grpc.HealthStub(stubs.channel)
        reflection = reflection_pb2_grpc.ServerReflectionStub(stubs.channel)
        return [
            await health.Check(request, timeout=20).code(),
            await _first(health.Watch(request, timeout=20)),
            await _first(reflection.ServerReflectionInfo(iter([question]), timeout=20)),
        ]


async def test_health_can_be_closed_to_strangers_and_reflection_turned_off(keys: Path) -> None:
    ok, unknown, off = grpc.StatusCode.OK, grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNIMPLEMENTED
    for is_open, stranger, reader in (
        (True, [ok, ok, unknown], [ok, ok, ok]),
        (False, [unknown, unknown, off], [ok, ok, off]),
    ):
        settings = replace(LOCAL, has_open_health=is_open, has_reflection=is_open)
        async with by_certificate(keys, settings) as (server, tls):
            assert await _open_to(server.port, tls(None)) == stranger
            assert await _open_to(server.port, tls(CALLERS["reader"])) == reader


SUBJECTS: list[list[x509.GeneralName]] = [
    [x509.DNSName("skerry://learner/us")],
    [x509.UniformResourceIdentifier("https://learner/us")],
    [x509.UniformResourceIdentifier("skerry://owner/us")],
    [x509.UniformResourceIdentifier("skerry://learner/a/b/us")],
    [x509.UniformResourceIdentifier("skerry://learner/../us")],
    [x509.UniformResourceIdentifier(f"skerry://{one}/us") for one in ("learner", "admin")],
]


async def test_a_certificate_that_names_no_client_or_two_has_no_role(keys: Path) -> None:
    usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH])
    async with by_certificate(keys) as (server, _):
        for number, names in enumerate(SUBJECTS):
            make_pair(keys, Wanted(f"odd{number}", x509.SubjectAlternativeName(names), usage))
            async with connected(server.port, tls_of(keys, f"odd{number}")) as stubs:
                with refused("UNAUTHENTICATED", grpc.StatusCode.UNAUTHENTICATED):
                    await stubs.runs.GetRun(runs.GetRunRequest(name="demo"), timeout=20)


async def test_the_log_says_whose_calls_were_refused(keys: Path) -> None:
    with heard_logs() as lines:
        async with by_certificate(keys) as (server, tls), connected(server.port, tls(CALLERS["reader"])) as stubs:
            assert await asked(stubs, "Runs/CreateRun", REQUESTS["Runs/CreateRun"]) == "PERMISSION_DENIED"
    (refusal,) = [one for one in lines if one["event"] == "call refused"]
    assert (refusal["reason"], refusal["identity"]) == ("PERMISSION_DENIED", "skerry://reader/prom")
    assert str(refusal["peer"]).startswith("ipv4:127.0.0.1:")


async def test_a_client_on_the_deny_list_is_refused_and_its_streams_end(keys: Path, tmp_path: Path) -> None:
    file = tmp_path / "denied"
    file.write_text("# nobody yet\n")
    clock = StillClock()
    settings = replace(LOCAL, deny_list=DenyList(file, clock))
    async with (
        by_certificate(keys, settings) as (server, tls),
        connected(server.port, tls(CALLERS["learner"])) as ours,
        connected(server.port, tls(CALLERS["learner of the run"])) as theirs,
    ):
        run, _ = await create_run(ours)
        denied = await attached(ours, run, "us")
        file.write_text("skerry://learner/us  # left the team\n")
        clock.now_s += 2
        with refused("PERMISSION_DENIED", grpc.StatusCode.PERMISSION_DENIED):
            await pull(ours, run, "body")
        await denied.report()
        with refused("PERMISSION_DENIED", grpc.StatusCode.PERMISSION_DENIED):
            await denied.event("draining")
        await attached(theirs, run, "us")


async def test_an_illegal_session_id_is_neither_answered_nor_logged(stubs: Stubs) -> None:
    secret = "SECRET" * 5 + "OO"
    with heard_logs() as lines:
        run, _ = await create_run(stubs)
        with refused("BAD_NAME", grpc.StatusCode.INVALID_ARGUMENT) as caught:
            await RawLearner(stubs, run, "us", random.Random(1), session=secret).attach()
    assert "SECRET" not in caught.refusal.message
    assert "SECRET" not in str(lines)


async def test_who_has_no_identity_is_refused_before_a_message_comes(keys: Path) -> None:
    async def silent() -> AsyncIterator[bytes]:
        await asyncio.Event().wait()
        yield b""

    async with by_certificate(keys) as (server, tls), connected(server.port, tls(None)) as stubs:
        async with asyncio.timeout(10):
            for method in METHODS:
                with refused("UNAUTHENTICATED", grpc.StatusCode.UNAUTHENTICATED):
                    await stubs.channel.stream_unary(f"/skerry.v1.{method}", None, None)(silent())
