"""Ports for servers that are killed and started again on the port that they had."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_FIRST = 10_000  # below are those of known services
_GIVEN_OUT = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST_GIVEN = 49_152  # where that file is missing (RFC 6335, section 6)
_SOURCE = random.SystemRandom()


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Returns ports on which nobody listens, none of which the system gives to a connection or for port 0.

    One that it gives could be another process's while the server is down, and the server could not start again.
    """
    first_given = int(_GIVEN_OUT.read_text(encoding="ascii").split()[0]) if _GIVEN_OUT.exists() else _FIRST_GIVEN
    candidates = range(_FIRST, first_given)
    free = filter(lambda port: _is_free(host, port), _SOURCE.sample(candidates, len(candidates)))
    return [next(free) for _ in range(count)]


def _is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
