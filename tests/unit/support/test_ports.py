"""Tests of the ports that a killed server finds free again."""

from __future__ import annotations

import socket

from tests.support.ports import free_ports


def test_the_system_gives_none_of_them_to_somebody_else() -> None:
    ports = free_ports(20)
    given = [socket.create_server(("127.0.0.1", 0)) for _ in range(20)]
    try:
        assert len(set(ports)) == 20
        assert max(ports) < min(one.getsockname()[1] for one in given)
    finally:
        for one in given:
            one.close()


def test_none_of_them_has_a_listener() -> None:
    (port,) = free_ports(1)
    with socket.create_server(("127.0.0.1", port)):
        assert port not in free_ports(20_000)
