"""A syncer with TLS: who gets in, what each may do, and how new certificates are taken up while it serves."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import ssl
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509

from skerry import RunsClient, Tls
from skerry.cli.authority import Authority, client
from skerry.v1 import capabilities_pb2
from skerry.v1 import runs_pb2 as runs
from skerry.v1 import types_pb2 as types
from skerry.wire.identity import Role
from skerry_syncer.access.certificates import server_credentials
from skerry_syncer.access.deny_list import DenyList
from skerry_syncer.server import SyncerServer, serving
from skerry_syncer.store.log.entries import INITIAL_BASE, PolicyItem, RollbackItem, StatusItem
from skerry_syncer.store.objects.opening import open_objects
from tests.integration.syncer.conftest import LOCAL
from tests.support.heard_logs import heard_logs
from tests.support.http2 import PREFACE
from tests.support.made_keys import make_keys, replace_pair, tls_of
from tests.support.raw_learner import (
    RawLearner,
    Stubs,
    attached,
    connected,
    create_run,
    delta_values,
    events_until,
    observed,
    pull,
    refused,
)
from tests.support.serve_process import serve_process
from tests.support.still_clock import StillClock

SERVER = ("--server", "a.example")
DENIED = ("PERMISSION_DENIED", grpc.StatusCode.PERMISSION_DENIED)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """An authority, a server's certificate, and its clients'."""
    learners = ("--learner", "us", "--learner", "demo/us", "--learner", "demo/eu")
    make_keys(tmp_path / "keys", *SERVER, *learners, "--reader", "prom", "--admin", "anna")
    return tmp_path / "keys"


@contextlib.asynccontextmanager
async def tls_server(tls: Tls, **settings: Any) -> AsyncIterator[SyncerServer]:
    async with serving(open_objects("memory://"), replace(LOCAL, tls=tls, **settings)) as server:
        yield server


@pytest.fixture
async def secured(keys: Path) -> AsyncIterator[SyncerServer]:
    """A server that asks its clients for their certificates."""
    async with tls_server(tls_of(keys, "a.example")) as server:
        yield server


async def answered(stubs: Stubs) -> bool:
    """Whether a call is answered, and not refused with its connection."""
    try:
        await stubs.capabilities.GetCapabilities(capabilities_pb2.GetCapabilitiesRequest(), timeout=10)
    except grpc.aio.AioRpcError as error:
        return error.code() is not grpc.StatusCode.UNAVAILABLE
    return True


async def gets_in(port: int, tls: Tls) -> bool:
    """Whether a client with a connection of its own gets an answer."""
    async with connected(port, tls) as stubs:
        return await answered(stubs)


def replace_authority(keys: Path, new: Path) -> None:
    """Gives the server the certificate and the authority of another folder."""
    replace_pair(keys, "a.example", new)
    (keys / "ca.pem").write_bytes((new / "ca.pem").read_bytes())


async def test_who_gets_in_depends_on_both_ends_certificates(keys: Path, tmp_path: Path) -> None:
    make_keys(tmp_path / "others", "--learner", "us")
    stranger = replace(tls_of(tmp_path / "others", "us"), ca=keys / "ca.pem")
    for own, clients in (
        (tls_of(keys, "a.example", ca=False), {tls_of(keys): True}),
        (tls_of(keys, "a.example"), {tls_of(keys, "us"): True, tls_of(keys): False, stranger: False}),
        (tls_of(keys, "us"), {tls_of(keys, "demo.eu"): False}),  # a learner's certificate does not make a server
    ):
        async with tls_server(own) as server:
            assert {client: await gets_in(server.port, client) for client in clients} == clients


@pytest.mark.long
async def test_connections_of_the_same_moment_leave_a_syncer_serving(keys: Path, tmp_path: Path) -> None:
    """As two learners, a probe or a scan of ports make them."""

    def connect(port: int) -> None:
        end_s = time.monotonic() + 4
        while time.monotonic() < end_s:
            socket.create_connection(("127.0.0.1", port), timeout=10).close()

    own = ("--tls-cert", f"{keys}/a.example.pem", "--tls-key", f"{keys}/a.example.key")
    async with serve_process("memory://", tmp_path, *own, "--tls-client-ca", f"{keys}/ca.pem") as process:
        await asyncio.gather(*(asyncio.to_thread(connect, process.port) for _ in range(16)))
        assert await gets_in(process.port, tls_of(keys, "us"))


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_a_session_is_resumed_for_a_minute_and_then_the_certificate_is_looked_at_again(
    version: ssl.TLSVersion, keys: Path
) -> None:
    def connect(port: int, session: ssl.SSLSession | None) -> tuple[ssl.SSLSession | None, bool | None]:
        """Returns the session of a connection that the server spoke HTTP/2 on, and whether it was resumed."""
        with socket.create_connection(("127.0.0.1", port), timeout=10) as plain:
            connection = context.wrap_socket(plain, server_hostname="localhost", session=session)
            connection.sendall(PREFACE)
            assert connection.recv(9)
            return connection.session, connection.session_reused

    context = ssl.create_default_context(cafile=keys / "ca.pem")
    context.load_cert_chain(keys / "us.pem", keys / "us.key")
    context.set_alpn_protocols(["h2"])
    context.minimum_version = context.maximum_version = version
    clock, server = StillClock(), grpc.aio.server()
    port = server.add_secure_port("127.0.0.1:0", server_credentials(tls_of(keys, "a.example"), clock))
    await server.start()
    session, are_resumed = None, []
    for pause_s in (0, 59, 2, 0):
        clock.now_s += pause_s
        session, is_resumed = await asyncio.to_thread(connect, port, session)
        are_resumed.append(is_resumed)
    await server.stop(None)
    assert are_resumed == [False, True, False, True]


async def test_new_files_decide_who_gets_in_from_then_on_and_broken_ones_change_nothing(
    keys: Path, tmp_path: Path
) -> None:
    make_keys(tmp_path / "new", *SERVER, "--learner", "us")
    old, new = tls_of(keys, "us"), tls_of(tmp_path / "new", "us")
    both = (keys / "ca.pem").read_bytes() + (tmp_path / "new" / "ca.pem").read_bytes()
    key = keys / "a.example.key"
    whole = key.read_bytes()
    with heard_logs() as logs:
        async with tls_server(tls_of(keys, "a.example")) as server, connected(server.port, old) as open_before:
            assert await answered(open_before)
            key.write_bytes((keys / "demo.eu.key").read_bytes())
            for _ in range(2):
                assert await gets_in(server.port, old)
            key.write_bytes(whole)
            assert not await gets_in(server.port, replace(new, ca=keys / "ca.pem"))
            (keys / "ca.pem").write_bytes(both)
            assert await gets_in(server.port, old)
            assert await gets_in(server.port, replace(new, ca=keys / "ca.pem"))
            replace_authority(keys, tmp_path / "new")
            assert await gets_in(server.port, new)
            assert not await gets_in(server.port, replace(old, ca=tmp_path / "new" / "ca.pem"))
            assert await answered(open_before)
            assert open_before.channel.get_state() is grpc.ChannelConnectivity.READY
    (warning,) = [line for line in logs if line["log_level"] == "warning"]
    assert warning["event"] == "certificates can't be reloaded, what was read before stays in force"
    assert key.name in str(warning["because"])


async def test_an_open_connection_does_not_outlive_its_certificate_for_long(keys: Path, tmp_path: Path) -> None:
    make_keys(tmp_path / "new", *SERVER)
    async with (
        tls_server(tls_of(keys, "a.example"), tls_connection_age_s=1.0) as server,
        connected(server.port, tls_of(keys, "us")) as client,
    ):
        assert await answered(client)
        replace_authority(keys, tmp_path / "new")
        async with asyncio.timeout(20):
            while await answered(client):
                await asyncio.sleep(0.1)


async def test_the_containers_health_check_connects_as_commands_in_the_container_do(
    keys: Path, secured: SyncerServer
) -> None:
    async def status(port: int, **variables: str) -> int:
        program = Path(__file__).parents[3] / "docker" / "healthcheck.py"
        others = {name: value for name, value in os.environ.items() if not name.startswith("SKERRY_")}
        env = {**others, "SKERRY_LISTEN": f"0.0.0.0:{port}", **variables}
        check = await asyncio.create_subprocess_exec(sys.executable, str(program), env=env)
        return await check.wait()

    ca = {"SKERRY_TLS_CA": f"{keys}/ca.pem"}
    own = {"SKERRY_TLS_CERT": f"{keys}/us.pem", "SKERRY_TLS_KEY": f"{keys}/us.key"}
    assert [await status(secured.port, **env) for env in ({**ca, **own}, ca)] == [0, 1]


async def test_a_learner_speaks_for_itself_and_whose_call_was_refused_is_logged(
    keys: Path, secured: SyncerServer
) -> None:
    async with (
        connected(secured.port, tls_of(keys, "us")) as ours,
        connected(secured.port, tls_of(keys, "demo.eu")) as theirs,
    ):
        run, _ = await create_run(ours)  # which says "creator"
        deltas = (await secured.host.open("demo")).state.deltas.values()
        assert {delta.item.learner for delta in deltas if delta.item.base_version == INITIAL_BASE} == {"us"}
        learner = await attached(ours, run, "us")
        liar = RawLearner(theirs, run, "us", random.Random(2), session=learner.session)
        header = liar.header(await pull(theirs, run, "body"), "body")
        with heard_logs() as lines, refused(*DENIED):
            await liar.push(header, delta_values())
        await learner.advance()
    # A push whose stream ends before its answer is read is repeated, and refused again.
    refusals = {(line["reason"], line["identity"]) for line in lines if line["event"] == "call refused"}
    assert refusals == {("PERMISSION_DENIED", "skerry://learner/demo/eu")}


async def test_an_identity_of_spiffe_has_its_role_and_the_workloads_other_names_do_not_matter(
    keys: Path, secured: SyncerServer
) -> None:
    uris = ("spiffe://a.example/ns/train/sa/default", "spiffe://a.example/skerry/learner/demo/ap")
    subject = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri) for uri in uris])
    Authority(keys, datetime.now(UTC)).make(client(Role.LEARNER, "spiffe")._replace(subject=subject), days=1)
    async with connected(secured.port, tls_of(keys, "spiffe")) as stubs:
        run, _ = await create_run(stubs)
        await (await attached(stubs, run, "ap")).advance()
        with refused(*DENIED):
            await attached(stubs, run, "us")


async def test_the_log_says_who_changed_a_run(keys: Path, secured: SyncerServer) -> None:
    async with connected(secured.port, tls_of(keys, "anna")) as stubs:
        run, _ = await create_run(stubs)
        policy = types.Policy(quorum_count=2)
        await stubs.runs.SetPolicy(runs.SetPolicyRequest(request_id="a" * 32, name="demo", policy=policy))
        await stubs.runs.RollBack(runs.RollBackRequest(request_id="b" * 32, name="demo", target_position=run.position))
        await stubs.runs.CloseRun(runs.CloseRunRequest(name="demo"))
        log = (await secured.host.open("demo")).log
        authors = [
            (type(item).__name__, item.author)
            async for entry, _ in log.entries()
            for item in entry.items
            if isinstance(item, PolicyItem | StatusItem | RollbackItem)
        ]
    names = ("PolicyItem", "StatusItem", "PolicyItem", "RollbackItem", "StatusItem")
    assert authors == [*((name, "skerry://admin/anna") for name in names), ("StatusItem", "")]  # that all is merged


async def test_a_learner_judges_by_its_own_name_and_a_reader_does_not_judge(keys: Path, secured: SyncerServer) -> None:
    async with (
        connected(secured.port, tls_of(keys, "us")) as learner,
        connected(secured.port, tls_of(keys, "anna")) as admin,
        connected(secured.port, tls_of(keys, "prom")) as reader,
    ):
        run, _ = await create_run(learner)

        def request(judge: str, digit: str) -> runs.ReportMetricsRequest:
            return runs.ReportMetricsRequest(
                request_id=digit * 32, name="demo", position=run.position, judge=judge, metrics={"loss": 3.0}
            )

        own = (await learner.runs.ReportMetrics(request("us", "1"))).report
        others = (await admin.runs.ReportMetrics(request("eval", "2"))).report
        for stubs, judge in ((learner, "eval"), (reader, "prom")):
            with refused(*DENIED):
                await stubs.runs.ReportMetrics(request(judge, "3"))
    assert (own.author, others.author) == ("skerry://learner/us", "skerry://admin/anna")


async def test_a_run_can_want_learners_that_were_enrolled_in_it(keys: Path, secured: SyncerServer) -> None:
    async with (
        connected(secured.port, tls_of(keys, "anna")) as admin,
        connected(secured.port, tls_of(keys, "us")) as anywhere,
        connected(secured.port, tls_of(keys, "demo.us")) as here,
    ):
        run, _ = await create_run(admin)
        learner = await attached(anywhere, run, "us")
        header = learner.header(await pull(anywhere, run, "body"), "body")
        policy = types.Policy(enrols_by_run=True)
        await admin.runs.SetPolicy(runs.SetPolicyRequest(request_id="a" * 32, name="demo", policy=policy))
        for call in (learner.push(header, delta_values()), learner.attach()):
            with refused(*DENIED):
                await call
        await attached(here, run, "us")


async def _open_to(port: int, tls: Tls) -> list[grpc.StatusCode]:
    """Returns what a caller gets from health and from reflection."""
    methods = ("grpc.health.v1.Health/Check", "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
    async with connected(port, tls) as stubs:
        # Sent at once: a stream that is refused before its message is sent ends with INTERNAL.
        calls = [stubs.channel.unary_unary(f"/{method}", None, None)(b"", timeout=20) for method in methods]
        return [await call.code() for call in calls]


async def test_health_can_be_closed_to_strangers_and_reflection_turned_off(keys: Path) -> None:
    ok, unknown, off = grpc.StatusCode.OK, grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNIMPLEMENTED
    for is_open, stranger, reader in ((True, [ok, unknown], [ok, ok]), (False, [unknown, off], [ok, off])):
        own = tls_of(keys, "a.example")  # which names no client
        async with tls_server(own, has_open_health=is_open, has_reflection=is_open) as server:
            assert await _open_to(server.port, own) == stranger
            assert await _open_to(server.port, tls_of(keys, "prom")) == reader


async def test_a_client_on_the_deny_list_is_refused_and_its_streams_end(keys: Path, tmp_path: Path) -> None:
    file, clock = tmp_path / "denied", StillClock()
    file.write_text("# nobody yet\n")
    async with (
        tls_server(tls_of(keys, "a.example"), deny_list=DenyList(file, clock)) as server,
        connected(server.port, tls_of(keys, "us")) as ours,
        connected(server.port, tls_of(keys, "demo.us")) as theirs,
    ):
        run, _ = await create_run(ours)
        learner = await attached(ours, run, "us")
        file.write_text("skerry://learner/us  # left the team\n")
        clock.now_s += 2
        with refused(*DENIED):
            await pull(ours, run, "body")
        await learner.report()
        with refused(*DENIED):
            await learner.event("status_changed")
        await attached(theirs, run, "us")


async def test_the_account_knows_the_organisation_of_a_learners_certificate(keys: Path, secured: SyncerServer) -> None:
    make_keys(keys, "--learner", "ap", "--organisation", "Lab Ä")
    async with (
        connected(secured.port, tls_of(keys, "anna")) as admin,
        connected(secured.port, tls_of(keys, "ap")) as lab,
        connected(secured.port, tls_of(keys, "us")) as nobody,
    ):
        run, _ = await create_run(admin)
        for stubs, name, round_count in ((lab, "ap", 2), (nobody, "us", 1)):
            learner = await attached(stubs, run, name)
            for _ in range(round_count):
                await learner.advance()
    with RunsClient(f"127.0.0.1:{secured.port}", tls=tls_of(keys, "anna")) as client:
        rows = await asyncio.to_thread(client.account, "demo")
        listed = (await asyncio.to_thread(client.get_run, "demo")).learners
    assert {each.learner_id: each.organisation for each in listed} == {"ap": "Lab Ä", "us": ""}
    shares = {(row.learner_id, row.organisation): (round(3 * row.weight_share), row.version_count) for row in rows}
    assert shares == {("ap", "Lab Ä"): (2, 2), ("", "Lab Ä"): (2, 2), ("us", ""): (1, 1), ("", ""): (1, 1)}
    tokens = [(row.token_count, row.step_count) for row in rows if row.learner_id]
    assert tokens == [(400, 4), (200, 2)], "of two fragments only one was trained"


async def test_whoever_has_an_ejected_learners_certificate_has_no_part_in_the_run(
    keys: Path, secured: SyncerServer
) -> None:
    async with (
        connected(secured.port, tls_of(keys, "anna")) as admin,
        connected(secured.port, tls_of(keys, "demo.us")) as us,
        connected(secured.port, tls_of(keys, "demo.eu")) as eu,
    ):
        run, _ = await create_run(admin)
        await attached(us, run, "us")
        others, theirs = await observed(eu, run), await observed(us, run)
        request = runs.SetEjectionRequest(request_id="1" * 32, name="demo", learner_id="us", is_ejected=True)
        with refused(*DENIED):
            await eu.runs.SetEjection(request)
        await admin.runs.SetEjection(request)
        changed = (await events_until(others, "ejection_changed"))[-1].ejection_changed
        assert changed.author == "skerry://admin/anna"
        for call in (
            events_until(theirs, "never"),
            pull(us, run, "body"),
            us.runs.GetRun(runs.GetRunRequest(name="demo")),
        ):
            with refused("EJECTED", grpc.StatusCode.PERMISSION_DENIED):
                await call
        await pull(eu, run, "body")
