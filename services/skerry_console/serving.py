"""What uvicorn serves the console with: headers, TLS, and whose certificate a request came with."""

from __future__ import annotations

import asyncio
import ssl
from typing import Any, Final

from uvicorn.protocols.http.h11_impl import H11Protocol

from skerry import Tls

_HEADERS: Final = [  # which keep other sites' scripts and frames out
    ("content-security-policy", "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:"),
    ("x-content-type-options", "nosniff"),
    ("referrer-policy", "no-referrer"),
]


class _Identified(H11Protocol):
    """Adds to the state of each request the `identities`, which are the URIs of its client's certificate."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn does
        certificate = transport.get_extra_info("peercert") or {}
        uris = [name for kind, name in certificate.get("subjectAltName", ()) if kind == "URI"]
        self.app_state = {**self.app_state, "identities": uris}
        super().connection_made(transport)


def server_options(files: Tls) -> dict[str, Any]:
    """Returns uvicorn's options, with TLS if there are files; with an authority, for clients with its certificates."""
    options: dict[str, Any] = {"log_level": "warning", "timeout_graceful_shutdown": 1, "headers": _HEADERS}
    if files.cert is not None:
        options |= {"ssl_certfile": files.cert, "ssl_keyfile": files.key}
    if files.ca is not None:
        options |= {"ssl_ca_certs": str(files.ca), "ssl_cert_reqs": ssl.CERT_REQUIRED, "http": _Identified}
    return options
