"""A syncer with TLS: who gets in, and how it takes up new certificates while it serves."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

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


@contextlib.asynccontextmanager
async def tls_server(tls: Tls, age_s: float = LOCAL.tls_connection_age_s) -> AsyncIterator[SyncerServer]:
    async with serving(open_objects("memory://"), replace(LOCAL, tls=tls, tls_connection_age_s=age_s)) as server:
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
        (tls_of(keys, "us"), {tls_of(keys, "eu"): False}),  # a learner's certificate does not make a server
    ):
        async with tls_server(own) as server:
            assert {client: await gets_in(server.port, client) for client in clients} == clients


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_a_session_is_not_resumed_without_looking_at_the_certificate_again(
    version: ssl.TLSVersion, keys: Path
) -> None:
    def connect(session: ssl.SSLSession | None) -> tuple[ssl.SSLSession | None, bool | None]:
        """Returns the session of a connection that the server spoke HTTP/2 on, and whether it was resumed."""
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as plain:
            connection = context.wrap_socket(plain, server_hostname="localhost", session=session)
            connection.sendall(PREFACE)
            assert connection.recv(9)
            return connection.session, connection.session_reused

    context = ssl.create_default_context(cafile=keys / "ca.pem")
    context.load_cert_chain(keys / "us.pem", keys / "us.key")
    context.set_alpn_protocols(["h2"])
    context.minimum_version = context.maximum_version = version
    async with tls_server(tls_of(keys, "a.example")) as server:
        session, _ = await asyncio.to_thread(connect, None)
        _, is_resumed = await asyncio.to_thread(connect, session)
    assert not is_resumed


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
            key.write_bytes((keys / "eu.key").read_bytes())
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
        tls_server(tls_of(keys, "a.example"), age_s=1.0) as server,
        connected(server.port, tls_of(keys, "us")) as client,
    ):
        assert await answered(client)
        replace_authority(keys, tmp_path / "new")
        async with asyncio.timeout(20):
            while await answered(client):
                await asyncio.sleep(0.1)


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
        assert [await status(server.port, **env) for env in ({**ca, **own}, ca)] == [0, 1]
