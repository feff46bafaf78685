"""The syncer's side of TLS: credentials that follow the files on disk, and who a client is by its certificate."""

from __future__ import annotations

from typing import Any, Final

import grpc
from cryptography import x509
from cryptography.x509.oid import NameOID

from skerry.net.tls import Tls, TlsFiles
from skerry.runtime.clock import ThreadClock
from skerry.wire.identity import Identity, is_of_client
from skerry_syncer.access.reloading import Reloaded
from skerry_syncer.errors import SyncerError

# A client that connects again may resume its TLS session, and its certificate is not looked at. It can't under another
# configuration, so this is how long an expired certificate gets in.
_RESUMABLE_S: Final = 60.0
# gRPC frees the configuration before, and crashes if another thread is just about to begin a connection with it
# (grpc/grpc#36693). No thread comes to that point while gRPC waits for the next one, and the rest takes microseconds.
_PAUSE_S: Final = 0.1


def server_credentials(tls: Tls, clock: ThreadClock) -> grpc.ServerCredentials:
    """Returns the credentials of a port. With an authority to trust, clients must present a certificate of it.

    The files are read at each new connection; those that are open keep what they began with. TLS versions are gRPC's:
    1.3, or 1.2 with clients that have no other. Python's gRPC offers no choice.

    Raises:
        ValueError: the files can't be used.
    """
    configurations = Configurations(tls, clock)
    return grpc.dynamic_ssl_server_credentials(
        configurations.first,
        configurations.next,  # type: ignore[arg-type]  # its stub lacks None, which is to change nothing
        require_client_authentication=tls.ca is not None,
    )


class Configurations:
    """What new connections of a port are configured with, one after another.

    Raises:
        ValueError: the files can't be used.
    """

    def __init__(self, tls: Tls, clock: ThreadClock) -> None:
        self._files = Reloaded("certificates", tls.read)
        self._clock = clock
        self._used = self._files.value
        self._used_since_s = clock.monotonic_s()
        self.first = _configuration(self._used)

    def next(self) -> grpc.ServerCertificateConfiguration | None:
        """Returns a new configuration if the files have changed or the one in use is old; gRPC asks at each connection.

        Its threads do so, one at a time.
        """
        files, now_s = self._files.now(), self._clock.monotonic_s()
        if files == self._used and now_s < self._used_since_s + _RESUMABLE_S:
            return None
        self._used, self._used_since_s = files, now_s
        self._clock.block(_PAUSE_S)
        return _configuration(files)


def _configuration(files: TlsFiles) -> grpc.ServerCertificateConfiguration:
    assert files.cert is not None, "a server has a certificate"
    assert files.key is not None, "it was read with its key"
    return grpc.ssl_server_certificate_configuration([(files.key, files.cert)], root_certificates=files.ca)


def client_uri(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    """Returns the URI by which a client's certificate says who it is; all of them if there are several; "" if none.

    Other names don't count: only a URI that the authority signed as one is an identity.
    """
    uris = (uri.decode(errors="replace") for uri in context.auth_context().get("peer_uri", ()))
    return " ".join(uri for uri in uris if is_of_client(uri))


def identity_of(context: grpc.aio.ServicerContext[Any, Any]) -> Identity:
    """Returns who calls.

    Raises:
        SyncerError: UNAUTHENTICATED: the client's certificate does not say.
    """
    try:
        return Identity.parse(client_uri(context))
    except ValueError as error:
        message = (
            "the client's certificate does not say who it is: give one with exactly one skerry:// URI, as "
            f"`skerry keys` makes it. cause={error}"
        )
        raise SyncerError("UNAUTHENTICATED", message) from error


def organisation_of(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    """Returns the organisation (O) in the subject of a client's certificate; empty if there is none."""
    certificates = context.auth_context().get("x509_pem_cert", ())
    subjects = [x509.load_pem_x509_certificate(pem).subject for pem in certificates]
    names = [name.value for each in subjects for name in each.get_attributes_for_oid(NameOID.ORGANIZATION_NAME)]
    return str(names[0]) if names else ""
