"""docker/haproxy.cfg, by Debian's haproxy on loopback: TLS goes through it, and an address has bounded connections."""

from __future__ import annotations

import os
import select
import socket
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from skerry import RunsClient
from tests.e2e.machine import ROOT, SYSTEM_PATH, need_programs, wait_until
from tests.support.made_keys import make_keys, tls_of
from tests.support.ports import free_ports
from tests.support.syncer_thread import syncer

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

_MOST_AT_ONCE = 128
_MOST_IN_10_S = 200


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys", "--server", "a.example", "--reader", "rita")
    return tmp_path / "keys"


@pytest.fixture
def proxy(keys: Path, tmp_path: Path) -> Iterator[int]:
    """The port of a proxy before a syncer with mutual TLS."""
    need_programs({"haproxy": "haproxy"})
    (port,) = free_ports(1)
    with syncer(tls_of(keys, "a.example")) as target, (tmp_path / "haproxy.log").open("wb") as log:
        env = {**os.environ, "PATH": SYSTEM_PATH, "SKERRY_BIND": f":{port}", "SKERRY_SYNCER": target}
        words = ["haproxy", "-db", "-f", str(ROOT / "docker/haproxy.cfg")]
        process = subprocess.Popen(words, env=env, stdout=log, stderr=log)
        try:
            wait_until(lambda: _is_listening(port), what="haproxy listens", timeout_s=20, every_s=0.1)
            yield port
        finally:
            process.kill()
            process.wait()


def _is_listening(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.9", port), timeout=1).close()
    except OSError:
        return False
    return True


def _connect(port: int, stack: ExitStack, source: str = "127.0.0.1") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=5, source_address=(source, 0))
    return stack.enter_context(connection)


def _closed_count(connections: list[socket.socket]) -> int:
    """Returns how many of them the other end has closed; it says nothing on those that are open."""
    return len(select.select(connections, [], [], 0)[0])


def _connections(port: int, stack: ExitStack, count: int) -> list[socket.socket]:
    """Returns connections that say nothing, without those that were refused before they were there."""
    connections = []
    for _ in range(count):
        with suppress(ConnectionResetError):
            connections.append(_connect(port, stack))
    return connections


def test_a_client_is_known_by_its_certificate_behind_the_proxy(proxy: int, keys: Path) -> None:
    with RunsClient(f"127.0.0.1:{proxy}", tls=tls_of(keys, "rita")) as client:
        assert client.list_runs() == []


def test_what_is_no_tls_is_closed(proxy: int) -> None:
    with ExitStack() as stack:
        plain, silent = _connect(proxy, stack), _connect(proxy, stack)
        plain.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        wait_until(lambda: _closed_count([plain, silent]) == 2, what="both are closed", timeout_s=20)


def test_an_address_has_so_many_connections_at_once_and_in_ten_seconds_and_others_have_theirs(
    proxy: int, keys: Path
) -> None:
    with ExitStack() as stack:
        held = _connections(proxy, stack, _MOST_AT_ONCE + 20)
        closed_count = wait_until(lambda: _closed_count(held), what="those above the bound are closed", timeout_s=4)
        assert closed_count <= 20
        for connection in held:
            connection.close()
        later = _connections(proxy, stack, _MOST_IN_10_S - _MOST_AT_ONCE)
        wait_until(
            lambda: len(later) < _MOST_IN_10_S - _MOST_AT_ONCE or _closed_count(later),
            what="those of 220 in ten seconds that are too many are refused",
            timeout_s=4,
        )
        context = ssl.create_default_context(cafile=keys / "ca.pem")
        context.load_cert_chain(keys / "rita.pem", keys / "rita.key")
        other = context.wrap_socket(_connect(proxy, stack, "127.0.0.2"), server_hostname="localhost")
        assert other.version() == "TLSv1.3"
        other.close()
