"""The console's own TLS: uvicorn's options, and whose certificate a request came with."""

from __future__ import annotations

import asyncio
import ssl
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from skerry import Tls


class _Identified(H11Protocol):
    """Adds to the state of each request the `identities`, which are the URIs of its client's certificate."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn does
        certificate = transport.get_extra_info("peercert") or {}
        uris = [name for kind, name in certificate.get("subjectAltName", ()) if kind == "URI"]
        self.app_state = {**self.app_state, "identities": uris}
        super().connection_made(transport)


def with_tls(files: Tls) -> dict[str, Any]:
    """Returns what makes uvicorn serve with these files; with an authority, to clients with its certificates only."""
    if files.cert is None:
        return {}
    options: dict[str, Any] = {"ssl_certfile": files.cert, "ssl_keyfile": files.key}
    if files.ca is not None:
        options |= {"ssl_ca_certs": str(files.ca), "ssl_cert_reqs": ssl.CERT_REQUIRED, "http": _Identified}
    return options
