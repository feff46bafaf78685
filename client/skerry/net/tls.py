"""Who is connected with TLS, and the PEM files of one end, checked here because gRPC does not say what is wrong."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar

from skerry.runtime.addresses import client_address, is_store, split_targets

if TYPE_CHECKING:
    from cryptography.x509 import ExtensionType

E = TypeVar("E", bound="ExtensionType")
Insecure = Literal["insecure"]
"""In place of `Tls`: plaintext, also beyond loopback, where everybody on the way can read and change it."""


class TlsFiles(NamedTuple):
    """What the files of one end of a connection hold."""

    ca: bytes | None
    cert: bytes | None
    key: bytes | None


@dataclass(frozen=True)
class Tls:
    """Where one end of a TLS connection has its files, all in PEM form.

        Tls(ca="keys/ca.pem", cert="keys/us-east.pem", key="keys/us-east.key")

    Args:
        ca: certificates of the authorities that the other end's certificate may come from. Without it a client trusts
            the public authorities that gRPC brings along, and a server asks for no client certificate.
        cert: this end's own certificate, followed by intermediate ones if there are any.
        key: the private key of `cert`, not encrypted.
    """

    ca: Path | str | None = None
    cert: Path | str | None = None
    key: Path | str | None = None

    def read(self, known: TlsFiles | None = None) -> TlsFiles:
        """Returns what the files hold now, after checking it; `known` itself if they still hold that.

        Raises:
            ValueError: a file can't be read or is not what it should be, or the key is not that of the certificate.
        """
        if (self.cert is None) != (self.key is None):
            raise ValueError(f"a certificate and its key must be given together. cert={self.cert}, key={self.key}")
        files = TlsFiles(_content(self.ca), _content(self.cert), _content(self.key))
        if files == known:
            return known
        self._check(files)
        return files

    def names(self) -> tuple[str, ...]:
        """Returns the URIs that the certificate names; none without one.

        Raises:
            ValueError: as `read`.
        """
        from cryptography import x509

        subject = self._extension(x509.SubjectAlternativeName)
        return () if subject is None else tuple(subject.get_values_for_type(x509.UniformResourceIdentifier))

    def is_for_server(self) -> bool:
        """Whether clients may take the certificate for a server's; it states no use, or this one among others.

        Raises:
            ValueError: as `read`.
        """
        from cryptography import x509
        from cryptography.x509.oid import ExtendedKeyUsageOID

        usages = self._extension(x509.ExtendedKeyUsage)
        serving = {ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.ANY_EXTENDED_KEY_USAGE}
        return self.cert is not None and (usages is None or not serving.isdisjoint(usages))

    def _extension(self, kind: type[E]) -> E | None:
        """Returns what the certificate says of a kind; None if it does not, or there is none."""
        from cryptography import x509

        cert = self.read().cert
        if cert is None:
            return None
        try:
            return x509.load_pem_x509_certificates(cert)[0].extensions.get_extension_for_class(kind).value
        except x509.ExtensionNotFound:
            return None

    def _check(self, files: TlsFiles) -> None:
        # The import takes a tenth of a second, so it is done only where TLS is used.
        from cryptography import x509
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        file, wanted = self.ca, "a certificate"
        try:
            if files.ca is not None:
                x509.load_pem_x509_certificates(files.ca)
            if files.cert is None or files.key is None:
                return
            file = self.cert
            owner = x509.load_pem_x509_certificates(files.cert)[0].public_key()
            file, wanted = self.key, "a private key without a password"
            own = load_pem_private_key(files.key, None).public_key()
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise ValueError(f"the TLS file must hold {wanted} in PEM form. file={file}") from error
        if own != owner:
            raise ValueError(
                "the private key is not that of the certificate; give the two files that were made together. "
                f"cert={self.cert}, key={self.key}"
            )


def tls_for(target: str, tls: Tls | Insecure | None) -> Tls | None:
    """Returns how to connect to a gRPC target; None is plaintext.

    Where nothing is given that is plaintext for a target on this machine, and TLS with the public authorities for
    others.

    Raises:
        ValueError: `tls` is another text than "insecure", or the target is no address.
    """
    if isinstance(tls, Tls):
        return tls
    if tls is not None:
        if tls != "insecure":
            raise ValueError(f"tls is a Tls, or 'insecure' for plaintext. tls={tls!r}")
        return None
    return None if is_here(target) else Tls()


def check_target(targets: str, tls: Tls | Insecure | None) -> set[Tls]:
    """Checks one or several targets and the files for them, and returns what TLS they are called with.

    Raises:
        ValueError: a target is no address, or a file can't be used; the message says what is wrong.
    """
    if is_store(targets):
        if isinstance(tls, Tls):
            raise ValueError(f"a store is opened with its own credentials, so leave tls out. target={targets[:100]!r}")
        return set()
    used = {own for target in split_targets(targets) if (own := tls_for(target, tls)) is not None}
    for own in used:
        own.read()
    return used


def is_here(target: str) -> bool:
    """Whether only this machine can be meant by a gRPC target, without looking names up.

    Raises:
        ValueError: the target is no address.
    """
    address = client_address(target)
    return address is None or is_loopback(address.host)


def is_loopback(host: str) -> bool:
    """Whether only this machine can be meant by a name or an address, without looking names up."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _content(path: Path | str | None) -> bytes | None:
    try:
        return None if path is None else Path(path).read_bytes()
    except OSError as error:
        raise ValueError(
            f"the TLS file can't be read; give its right path, or make keys with `skerry keys`. "
            f"file={path}, because={error.strerror}"
        ) from error
