"""Addresses written as HOST:PORT, checked before anything is done with them: gRPC takes port 99999 for another one.

The URL of a store may stand in place of a client's target (`skerry.net.own_syncer`).
"""

from __future__ import annotations

import ipaddress
import re
import socket
from typing import Final, NamedTuple

_LABEL: Final = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_HOST_NAME: Final = re.compile(rf"{_LABEL}(?:\.{_LABEL})*\.?")
_SCHEME: Final = re.compile(r"(?:dns|ipv4|ipv6):(?://[^/]*/)?")
_HIGHEST_PORT: Final = 2**16 - 1
_STORES: Final = frozenset({"file", "s3", "gs", "az"})


class Address(NamedTuple):
    """A host, without the brackets of an IPv6 address, and a port."""

    host: str
    port: int


def server_address(text: str) -> Address:
    """Returns the address that a server is to listen on; port 0 is any free one.

    Raises:
        ValueError: it is not HOST:PORT; the message says what is wrong.
    """
    return _parsed(text, text, lowest_port=0)


def client_address(target: str) -> Address | None:
    """Returns the address of one gRPC target, which may have a scheme as in dns:///HOST:PORT; None for a unix socket.

    Raises:
        ValueError: it is not HOST:PORT; the message says what is wrong.
    """
    scheme, _, path = target.partition(":")
    if scheme in {"unix", "unix-abstract"} and path:
        return None
    if "://" in target and scheme not in {"dns", "ipv4", "ipv6"}:
        raise ValueError(f"an address is HOST:PORT without {scheme}://. address={target[:100]!r}")
    return _parsed(target, _SCHEME.sub("", target, count=1), lowest_port=1)


def is_store(target: str) -> bool:
    """Whether a target is the URL of a store that several syncers can serve."""
    scheme, separator, rest = target.strip().partition("://")
    return scheme.lower() in _STORES and bool(separator and rest.strip())


def split_targets(targets: str) -> tuple[str, ...]:
    """Returns the targets of a list such as `a:443,b:443`; the URL of a store stands alone.

    Raises:
        ValueError: one of them is empty, or is no address.
    """
    if is_store(targets):
        return (targets.strip(),)
    stripped = tuple(target.strip() for target in targets.split(","))
    if not all(stripped):
        raise ValueError(f"a target is empty; write host:port, or several separated by commas. target={targets!r}")
    for target in stripped:
        client_address(target)
    return stripped


def check_free(address: Address) -> None:
    """Checks that a server can listen on the address now.

    Raises:
        OSError: it can't: the port is taken or reserved, or the address is not this machine's.
    """
    family, _, _, _, place = socket.getaddrinfo(*address, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    socket.create_server(place, family=family).close()


def _parsed(address: str, text: str, *, lowest_port: int) -> Address:
    host, colon, port = text.rpartition(":")
    if not colon or not host or text.endswith("]"):
        raise ValueError(f"use HOST:PORT, for example 127.0.0.1:50051. address={address[:100]!r}")
    # Not isdecimal alone, which other scripts' digits pass.
    is_number = port.isascii() and port.isdecimal() and len(port) <= 5
    if not (is_number and lowest_port <= int(port) <= _HIGHEST_PORT):
        raise ValueError(f"use HOST:PORT with a port from {lowest_port} to {_HIGHEST_PORT}. address={address[:100]!r}")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not _is_host(bare, is_bracketed=bare != host):
        raise ValueError(
            f"this is no host: use a name, an IPv4 address, or an IPv6 address in brackets. address={address[:100]!r}"
        )
    return Address(bare, int(port))


def _is_host(host: str, *, is_bracketed: bool) -> bool:
    is_number = host.rstrip(".").rpartition(".")[2].isdecimal()  # as the last part of no name is (RFC 1123)
    if not is_bracketed and not is_number:
        return _HOST_NAME.fullmatch(host) is not None
    try:
        return ipaddress.ip_address(host).version == (6 if is_bracketed else 4)
    except ValueError:
        return False
