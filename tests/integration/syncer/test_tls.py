"""A syncer with TLS: who gets in, and how it takes up new certificates while it serves."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import socket
import ssl
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from skerry import Tls
from skerry.v1 import capabilities_pb2
from skerry_syncer.server import SyncerServer, serving
from skerry_syncer.store.objects.opening import open_objects
from tests.integration.syncer.conftest import LOCAL
from tests.support.heard_logs import heard_logs
from tests.support.http2 import PREFACE
from tests.support.made_keys import make_keys, replace_pair, tls_of
from tests.support.raw_learner import Stubs, connected

SERVER = ("--server", "a.example")


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """An authority, a server's certificate and two learners'."""
    folder = tmp_path / "keys"
    make_keys(folder, *SERVER, "--learner", "us", "--learner", "eu")
    return folder


@pytest.fixture
def logs() -> Iterator[list[dict[str, object]]]:
    """What is logged, at every level."""
    with heard_logs() as captured:
        yield captured


@contextlib.asynccontextmanager
async def tls_server(tls: Tls, **settings: float) -> AsyncIterator[SyncerServer]:
    async with serving(open_objects("memory://"), replace(LOCAL, tls=tls, **settings)) as server:  # type: ignore[arg-type]
        yield server


async def gets_in(port: int, tls: Tls) -> bool:
    """Whether a client with a connection of its own gets an answer."""
    async with connected(port, tls) as stubs:
        try:
            await health_pb2_grpc.HealthStub(stubs.channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            return False
    return True


async def answered(stubs: Stubs) -> None:
    await stubs.capabilities.GetCapabilities(capabilities_pb2.GetCapabilitiesRequest(), timeout=10)


async def presented(port: int, tls: Tls) -> str:
    """Returns the digest of the certificate that a new connection is given."""
    context = ssl.create_default_context(cafile=tls.ca)
    assert tls.cert is not None
    context.load_cert_chain(tls.cert, tls.key)
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    connection: ssl.SSLObject = writer.get_extra_info("ssl_object")
    assert connection.version() == "TLSv1.3"
    der = connection.getpeercert(binary_form=True)
    assert der is not None
    writer.transport.abort()
    return hashlib.sha256(der).hexdigest()


def on_disk(keys: Path, name: str) -> str:
    """Returns the digest of the certificate in a file."""
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert((keys / f"{name}.pem").read_text())).hexdigest()


async def test_who_gets_in_depends_on_both_ends_certificates(keys: Path, tmp_path: Path) -> None:
    make_keys(tmp_path / "others", "--learner", "us")
    stranger = replace(tls_of(tmp_path / "others", "us"), ca=keys / "ca.pem")
    checker = tls_of(keys, "a.example")  # a health check beside the server
    for own, clients in (
        (tls_of(keys, "a.example", ca=False), {tls_of(keys): True}),
        (tls_of(keys, "a.example"), {tls_of(keys, "us"): True, checker: True, tls_of(keys): False, stranger: False}),
        (tls_of(keys, "us"), {tls_of(keys, "eu"): False}),  # a learner's certificate does not make a server
    ):
        async with tls_server(own) as server:
            assert {client: await gets_in(server.port, client) for client in clients} == clients


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_a_session_is_not_resumed_without_looking_at_the_certificate_again(
    version: ssl.TLSVersion, keys: Path
) -> None:
    def connect(name: str, session: ssl.SSLSession | None) -> tuple[ssl.SSLSession | None, bool | None]:
        """Returns the session of a connection that the server spoke HTTP/2 on, and whether it was resumed."""
        context.load_cert_chain(keys / f"{name}.pem", keys / f"{name}.key")
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as plain:
            connection = context.wrap_socket(plain, server_hostname="localhost", session=session)
            connection.sendall(PREFACE)
            assert connection.recv(9)
            return connection.session, connection.session_reused

    context = ssl.create_default_context(cafile=keys / "ca.pem")
    context.set_alpn_protocols(["h2"])
    context.minimum_version = context.maximum_version = version
    async with tls_server(tls_of(keys, "a.example")) as server:
        session, _ = await asyncio.to_thread(connect, "us", None)
        _, is_resumed = await asyncio.to_thread(connect, "us", session)
    assert not is_resumed


async def test_a_new_certificate_is_presented_to_new_connections_while_old_ones_live_on(
    keys: Path, logs: list[dict[str, object]]
) -> None:
    ours = tls_of(keys, "us")
    async with tls_server(tls_of(keys, "a.example")) as server, connected(server.port, ours) as old:
        await answered(old)
        before = await presented(server.port, ours)
        make_keys(keys, *SERVER, "--renew")
        after = await presented(server.port, ours)
        await answered(old)
        assert old.channel.get_state() is grpc.ChannelConnectivity.READY
        assert await gets_in(server.port, ours)
    assert after == on_disk(keys, "a.example") != before
    assert [entry["event"] for entry in logs].count("certificates reloaded") == 1


async def test_a_new_authority_decides_who_gets_in_from_then_on(keys: Path, tmp_path: Path) -> None:
    make_keys(tmp_path / "new", *SERVER, "--learner", "us")
    old, new = tls_of(keys, "us"), tls_of(tmp_path / "new", "us")
    both = (keys / "ca.pem").read_bytes() + (tmp_path / "new" / "ca.pem").read_bytes()
    async with tls_server(tls_of(keys, "a.example")) as server:
        assert not await gets_in(server.port, replace(new, ca=keys / "ca.pem"))
        (keys / "ca.pem").write_bytes(both)
        assert await gets_in(server.port, old)
        assert await gets_in(server.port, replace(new, ca=keys / "ca.pem"))
        replace_pair(keys, "a.example", tmp_path / "new")
        (keys / "ca.pem").write_bytes((tmp_path / "new" / "ca.pem").read_bytes())
        assert await gets_in(server.port, new)
        assert not await gets_in(server.port, replace(old, ca=tmp_path / "new" / "ca.pem"))


async def test_an_open_connection_does_not_outlive_its_certificate_for_long(keys: Path, tmp_path: Path) -> None:
    make_keys(tmp_path / "new", *SERVER)

    ours = tls_of(keys, "us")
    async with (
        tls_server(tls_of(keys, "a.example"), tls_connection_age_s=2.0) as server,
        connected(server.port, ours) as client,
    ):
        await answered(client)
        replace_pair(keys, "a.example", tmp_path / "new")
        (keys / "ca.pem").write_bytes((tmp_path / "new" / "ca.pem").read_bytes())
        await answered(client)
        await asyncio.sleep(3)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await answered(client)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("broken", ["other key", "no certificate", "missing"])
async def test_files_that_can_not_be_used_leave_the_old_certificate_in_service_and_are_logged_once(
    broken: str, keys: Path, logs: list[dict[str, object]]
) -> None:
    ours, file = tls_of(keys, "us"), keys / "a.example.key"
    whole = file.read_bytes()
    async with tls_server(tls_of(keys, "a.example")) as server:
        before = await presented(server.port, ours)
        match broken:
            case "other key":
                file.write_bytes((keys / "eu.key").read_bytes())
            case "no certificate":
                file = keys / "a.example.pem"
                whole = file.read_bytes()
                file.write_text("-----BEGIN CERTIFICATE-----\n")
            case "missing":
                file.unlink()
        for _ in range(3):
            assert await presented(server.port, ours) == before
        assert await gets_in(server.port, ours)
        (warning,) = [entry for entry in logs if entry["log_level"] == "warning"]
        assert warning["event"] == "certificates can't be reloaded, what was read before stays in force"
        assert file.name in str(warning["because"])
        file.write_bytes(whole)
        make_keys(keys, *SERVER, "--renew")
        assert await presented(server.port, ours) == on_disk(keys, "a.example") != before


async def test_the_containers_health_check_connects_as_commands_in_the_container_do(keys: Path) -> None:
    async def status(port: int, **variables: str) -> int:
        program = Path(__file__).parents[3] / "docker" / "healthcheck.py"
        others = {name: value for name, value in os.environ.items() if not name.startswith("SKERRY_")}
        env = {**others, "SKERRY_LISTEN": f"0.0.0.0:{port}", **variables}
        check = await asyncio.create_subprocess_exec(sys.executable, str(program), env=env)
        return await check.wait()

    ca = {"SKERRY_TLS_CA": f"{keys}/ca.pem"}
    own = {"SKERRY_TLS_CERT": f"{keys}/us.pem", "SKERRY_TLS_KEY": f"{keys}/us.key"}
    async with tls_server(tls_of(keys, "a.example")) as server:
        assert [await status(server.port, **env) for env in ({**ca, **own}, ca, {})] == [0, 1, 1]
    async with tls_server(tls_of(keys, "a.example", ca=False)) as server:
        assert await status(server.port, **ca) == 0


async def test_a_syncer_does_not_start_with_files_that_can_not_be_used(keys: Path) -> None:
    mixed = Tls(cert=keys / "a.example.pem", key=keys / "us.key")
    with pytest.raises(ValueError, match="private key is not that of the certificate"):
        async with tls_server(mixed):
            pass
