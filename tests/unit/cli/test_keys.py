"""`skerry keys`: what it makes, what it keeps, and who can use it."""

from __future__ import annotations

import shutil
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from tests.support.made_keys import make_keys, replace_pair


def certificate(folder: Path, name: str) -> x509.Certificate:
    return x509.load_pem_x509_certificate((folder / f"{name}.pem").read_bytes())


def names(folder: Path, name: str) -> x509.SubjectAlternativeName:
    return certificate(folder, name).extensions.get_extension_for_class(x509.SubjectAlternativeName).value


def test_one_command_makes_an_authority_and_certificates_for_servers_and_clients(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    clients = ("--learner", "us", "--learner", "gpt/eu", "--reader", "prom", "--admin", "anna")
    said = make_keys(folder, "--server", "a.example,10.0.0.1", *clients)
    stems = ["a.example", "anna", "ca", "gpt.eu", "prom", "us"]
    assert sorted(file.name for file in folder.iterdir()) == sorted(f"{s}.{e}" for s in stems for e in ("key", "pem"))
    server = names(folder, "a.example")
    assert set(server.get_values_for_type(x509.DNSName)) == {"a.example", "localhost"}
    assert {str(address) for address in server.get_values_for_type(x509.IPAddress)} == {"10.0.0.1", "127.0.0.1", "::1"}
    uris = {
        name: names(folder, name).get_values_for_type(x509.UniformResourceIdentifier)
        for name in ("us", "gpt.eu", "prom", "anna")
    }
    assert uris == {
        "us": ["skerry://learner/us"],
        "gpt.eu": ["skerry://learner/gpt/eu"],
        "prom": ["skerry://reader/prom"],
        "anna": ["skerry://admin/anna"],
    }
    usages = certificate(folder, "us").extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert set(usages) == {ExtendedKeyUsageOID.CLIENT_AUTH}, "a learner can't stand for a server"
    pair = f"--tls-cert {folder}/us.pem --tls-key {folder}/us.key"
    assert f"skerry learn --learner-id us --target a.example:50051 --tls-ca {folder}/ca.pem {pair}\n" in said
    assert "skerry serve" in said


def test_keys_are_their_owners_alone_and_valid_for_the_days_asked_for(tmp_path: Path) -> None:
    folder, now = tmp_path / "keys", datetime.now(UTC)
    make_keys(folder, "--learner", "us")
    make_keys(folder, "--learner", "eu", "--days", "30")
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {key.stat().st_mode & 0o777 for key in folder.glob("*.key")} == {0o600}
    ends = {name: certificate(folder, name).not_valid_after_utc for name in ("us", "eu", "ca")}
    days = {name: round((end - now) / timedelta(days=1)) for name, end in ends.items()}
    assert days == {"us": 365, "eu": 30, "ca": 3652}


def test_openssl_verifies_the_certificates_by_its_strict_rules(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    make_keys(tmp_path, "--server", "a.example", "--learner", "us")
    for name, purpose in (("a.example", "sslserver"), ("us", "sslclient")):
        checked = subprocess.run(
            ["openssl", "verify", "-x509_strict", "-purpose", purpose, "-CAfile", tmp_path / "ca.pem",
             tmp_path / f"{name}.pem"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert checked.returncode == 0, checked.stdout + checked.stderr


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_what_is_there_is_replaced_only_when_that_is_asked_for(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    make_keys(folder, "--server", "a.example", "--learner", "us")
    before = contents(folder)
    said = make_keys(folder, "--server", "a.example", "--learner", "us", "--learner", "eu")
    assert [line.split()[0] for line in said.splitlines()[:4]] == ["kept", "kept", "kept", "made"]
    added = contents(folder)
    assert added.items() > before.items()
    assert added.keys() - before.keys() == {"eu.pem", "eu.key"}
    certificate(folder, "eu").verify_directly_issued_by(certificate(folder, "ca"))
    assert "other names; --renew replaces it" in make_keys(folder, "--server", "a.example,10.0.0.1", status=1)
    make_keys(folder, "--server", "a.example,10.0.0.1", "--renew")
    changed = {name for name, content in contents(folder).items() if content != added[name]}
    assert changed == {"a.example.pem", "a.example.key"}
    make_keys(tmp_path / "other", "--learner", "us")
    replace_pair(folder, "us", tmp_path / "other")
    assert "comes from another authority" in make_keys(folder, "--learner", "us", status=1)


def test_nothing_is_written_over_half_of_an_authority(tmp_path: Path) -> None:
    make_keys(tmp_path)
    (tmp_path / "ca.pem").unlink()
    key = (tmp_path / "ca.key").read_bytes()
    assert "ca.pem" in make_keys(tmp_path, "--learner", "us", status=1)
    assert [file.name for file in tmp_path.iterdir()] == ["ca.key"]
    assert (tmp_path / "ca.key").read_bytes() == key


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--server", "a.example:50051"), "without a port"),
        (("--server", "../a"), "a host name or an IP address"),
        (("--learner", "gpt/big/us"), "not legal"),
        (("--reader", "gpt/us"), "not legal"),
        (("--admin", "ca"), "the same file name"),
        (("--learner", "us", "--reader", "us"), "the same file name"),
    ],
)
def test_a_name_that_can_not_be_certified_is_refused_before_anything_is_made(
    words: tuple[str, ...], says: str, tmp_path: Path
) -> None:
    assert says in make_keys(tmp_path / "keys", *words, status=2)
    assert not (tmp_path / "keys").exists()


def test_an_organisation_is_written_into_the_certificates_of_clients(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    make_keys(folder, "--server", "a.example", "--learner", "us", "--organisation", "Lab A")
    subjects = {name: certificate(folder, name).subject.rfc4514_string() for name in ("us", "a.example")}
    assert subjects == {"us": "CN=us,O=Lab A", "a.example": "CN=a.example"}
    make_keys(folder, "--learner", "us")
    assert "another organisation" in make_keys(folder, "--learner", "us", "--organisation", "Lab B", status=1)
