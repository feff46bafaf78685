"""A private authority in a folder, and the certificates that it makes: X.509 with keys on the curve P-256."""

from __future__ import annotations

import ipaddress
import os
import re
from datetime import datetime, timedelta
from pathlib import Path
from typing import Final, NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from skerry.net.tls import Tls
from skerry.runtime.files import replacing
from skerry.wire.identity import Identity, Role

_HOST: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?")
_LIFETIME: Final = timedelta(days=3652)  # of an authority
# Certificates begin a little in the past, because the clocks of other machines differ.
_CLOCK_DIFFERENCE: Final = timedelta(hours=1)
# A server is also reached from its own machine, by health checks for example.
_LOCAL: Final = ("localhost", "127.0.0.1", "::1")
_SIGNS: Final = x509.KeyUsage(True, False, False, False, False, False, False, False, False)
_SIGNS_CERTIFICATES: Final = x509.KeyUsage(False, False, False, False, False, True, True, False, False)


class Wanted(NamedTuple):
    """A certificate to be made, as the files `name`.pem and `name`.key."""

    name: str
    subject: x509.SubjectAlternativeName
    usage: x509.ExtendedKeyUsage
    identity: Identity | None = None  # of a client
    organisation: str = ""


def server(hosts: str) -> Wanted:
    """Returns a server's certificate for names or IP addresses separated by commas, and for its own machine.

    Raises:
        ValueError: one of them is neither.
    """
    own = hosts.split(",")
    names = x509.SubjectAlternativeName([_host(host) for host in dict.fromkeys((*own, *_LOCAL))])
    # Also for clients, so that a health check beside the server needs no certificate of its own.
    usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
    return Wanted(own[0], names, usage)


def client(role: Role, name: str, organisation: str = "") -> Wanted:
    """Returns the certificate of a client, which can't stand for a server; a learner is ID or RUN/ID.

    Raises:
        ValueError: the name is not legal.
    """
    identity = Identity.parse(str(Identity(role, name)))
    names = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(str(identity))])
    usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH])
    return Wanted(f"{identity.run}{'.' if identity.run else ''}{identity.name}", names, usage, identity, organisation)


class Authority:
    """The authority of a folder: its ca.pem and ca.key, which are made if neither is there.

    Raises:
        OSError: the folder or a file can't be written.
        ValueError: the two files are not what they should be.
    """

    def __init__(self, folder: Path, now: datetime) -> None:
        self._folder = folder
        self._now = now
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        pair = self._read("ca")
        self.is_new = pair is None
        if pair is None:
            self._private = ec.generate_private_key(ec.SECP256R1())
            self._name = _name(f"Skerry authority {x509.random_serial_number():x}"[:32])
            self._end = now + _LIFETIME
            constraints = x509.BasicConstraints(ca=True, path_length=0)
            self.certificate = self._issue("ca", self._name, self._private, self._end, constraints, _SIGNS_CERTIFICATES)
            return
        self.certificate, private = pair
        if not isinstance(private, ec.EllipticCurvePrivateKey):
            raise ValueError("ca.key must be a key on an elliptic curve")  # noqa: TRY004 - the file is wrong, no argument
        self._private, self._name, self._end = private, self.certificate.subject, self.certificate.not_valid_after_utc

    def find(self, wanted: Wanted) -> x509.Certificate | None:
        """Returns the certificate that is there for what is wanted; None if there is none of its name.

        Raises:
            ValueError: it has other names or comes from another authority, or one of its files can't be used.
        """
        pair = self._read(wanted.name)
        if pair is None:
            return None
        certificate, _ = pair
        if certificate.issuer != self._name:
            raise ValueError(f"{wanted.name}.pem comes from another authority; --renew replaces it")
        if certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value != wanted.subject:
            raise ValueError(f"{wanted.name}.pem is there already with other names; --renew replaces it")
        if wanted.organisation and certificate.subject != _name(wanted.name[:64], wanted.organisation):
            raise ValueError(f"{wanted.name}.pem is there already with another organisation; --renew replaces it")
        return certificate

    def make(self, wanted: Wanted, days: int) -> x509.Certificate:
        """Returns a new certificate, valid for `days` but no longer than the authority; replaces files of its name.

        Raises:
            OSError: a file can't be written.
        """
        private = ec.generate_private_key(ec.SECP256R1())
        end = min(self._now + timedelta(days=days), self._end)
        extensions = (x509.BasicConstraints(ca=False, path_length=None), _SIGNS, wanted.usage, wanted.subject)
        return self._issue(wanted.name, _name(wanted.name[:64], wanted.organisation), private, end, *extensions)

    def _issue(
        self,
        file: str,
        subject: x509.Name,
        private: ec.EllipticCurvePrivateKey,
        end: datetime,
        *extensions: x509.ExtensionType,
    ) -> x509.Certificate:
        public = private.public_key()
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(self._now - _CLOCK_DIFFERENCE)
            .not_valid_after(end)
        )
        own = x509.SubjectKeyIdentifier.from_public_key(public)
        signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._private.public_key())
        for extension in (*extensions, own, signer):
            is_critical = isinstance(extension, x509.BasicConstraints | x509.KeyUsage)
            builder = builder.add_extension(extension, critical=is_critical)
        made = builder.sign(self._private, hashes.SHA256())
        pem, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
        self._write(f"{file}.key", private.private_bytes(pem, form, serialization.NoEncryption()), 0o600)
        self._write(f"{file}.pem", made.public_bytes(pem), 0o644)
        return made

    def _read(self, name: str) -> tuple[x509.Certificate, object] | None:
        cert, key = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        if not cert.exists() and not key.exists():
            return None
        files = Tls(cert=cert, key=key).read()
        assert files.cert is not None, "it was read"
        assert files.key is not None, "it was read"
        return x509.load_pem_x509_certificate(files.cert), serialization.load_pem_private_key(files.key, None)

    def _write(self, name: str, content: bytes, mode: int) -> None:
        with replacing(self._folder / name) as file:
            os.fchmod(file.fileno(), mode)
            file.write(content)


def _name(name: str, organisation: str = "") -> x509.Name:
    attributes = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, organisation)] if organisation else []
    return x509.Name([*attributes, x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        if not _HOST.fullmatch(host):
            raise ValueError(f"a server is a host name or an IP address, without a port. found={host[:80]!r}") from None
        return x509.DNSName(host)
