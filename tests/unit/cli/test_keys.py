"""`skerry keys`: what it makes, what it keeps, and who can use it."""

from __future__ import annotations

import shutil
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from tests.support.made_keys import make_keys


def certificate(folder: Path, name: str) -> x509.Certificate:
    return x509.load_pem_x509_certificate((folder / f"{name}.pem").read_bytes())


def names(found: x509.Certificate) -> x509.SubjectAlternativeName:
    return found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value


def usages(found: x509.Certificate) -> set[x509.ObjectIdentifier]:
    return set(found.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value)


def test_one_command_makes_an_authority_and_certificates_for_servers_and_clients(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    clients = ("--learner", "us", "--learner", "gpt/eu", "--reader", "prom", "--admin", "anna")
    said = make_keys(folder, "--server", "a.example,10.0.0.1", *clients)
    stems = ["a.example", "anna", "ca", "gpt.eu", "prom", "us"]
    assert sorted(file.name for file in folder.iterdir()) == sorted(f"{s}.{e}" for s in stems for e in ("key", "pem"))
    server = names(certificate(folder, "a.example"))
    assert set(server.get_values_for_type(x509.DNSName)) == {"a.example", "localhost"}
    assert {str(address) for address in server.get_values_for_type(x509.IPAddress)} == {"10.0.0.1", "127.0.0.1", "::1"}
    uris = {
        name: names(certificate(folder, name)).get_values_for_type(x509.UniformResourceIdentifier)
        for name in ("us", "gpt.eu", "prom", "anna")
    }
    assert uris == {
        "us": ["skerry://learner/us"],
        "gpt.eu": ["skerry://learner/gpt/eu"],
        "prom": ["skerry://reader/prom"],
        "anna": ["skerry://admin/anna"],
    }
    assert usages(certificate(folder, "us")) == {ExtendedKeyUsageOID.CLIENT_AUTH}, "a learner can't stand for a server"
    pair = f"--tls-cert {folder}/us.pem --tls-key {folder}/us.key"
    assert f"skerry learn --learner-id us --target a.example:50051 --tls-ca {folder}/ca.pem {pair}\n" in said
    assert "skerry serve" in said


def test_keys_are_readable_by_their_owner_alone(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys", "--server", "a.example")
    assert (tmp_path / "keys").stat().st_mode & 0o777 == 0o700
    assert [key.stat().st_mode & 0o777 for key in (tmp_path / "keys").glob("*.key")] == [0o600, 0o600]


def test_an_authority_is_valid_for_ten_years_and_a_certificate_for_the_days_asked_for(tmp_path: Path) -> None:
    make_keys(tmp_path, "--learner", "us")
    make_keys(tmp_path, "--learner", "eu", "--days", "30")
    now = datetime.now(UTC)
    days = {name: (certificate(tmp_path, name).not_valid_after_utc - now) / timedelta(days=1) for name in ("us", "eu")}
    assert days == {"us": pytest.approx(365, abs=0.1), "eu": pytest.approx(30, abs=0.1)}
    assert certificate(tmp_path, "ca").not_valid_after_utc > now + timedelta(days=3650)


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


def test_a_second_call_adds_certificates_of_the_same_authority_and_keeps_what_is_there(tmp_path: Path) -> None:
    make_keys(tmp_path, "--server", "a.example", "--learner", "us")
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    said = make_keys(tmp_path, "--server", "a.example", "--learner", "us", "--learner", "eu")
    after = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert after.items() > before.items()
    assert after.keys() - before.keys() == {"eu.pem", "eu.key"}
    assert [line.split()[0] for line in said.splitlines()[:4]] == ["kept", "kept", "kept", "made"]
    certificate(tmp_path, "eu").verify_directly_issued_by(certificate(tmp_path, "ca"))


def test_a_renewed_certificate_has_a_new_key_and_the_authority_stays(tmp_path: Path) -> None:
    make_keys(tmp_path, "--learner", "us")
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    make_keys(tmp_path, "--learner", "us", "--renew")
    changed = {file.name for file in tmp_path.iterdir() if file.read_bytes() != before[file.name]}
    assert changed == {"us.pem", "us.key"}
    certificate(tmp_path, "us").verify_directly_issued_by(certificate(tmp_path, "ca"))


def test_a_certificate_with_other_names_is_not_passed_off_as_the_one_that_was_asked_for(tmp_path: Path) -> None:
    make_keys(tmp_path, "--server", "a.example")
    said = make_keys(tmp_path, "--server", "a.example,10.0.0.1", status=1)
    assert "other names; --renew replaces it" in said
    make_keys(tmp_path, "--server", "a.example,10.0.0.1", "--renew")
    assert len(names(certificate(tmp_path, "a.example"))) == 5


def test_nothing_is_written_over_half_of_an_authority(tmp_path: Path) -> None:
    make_keys(tmp_path)
    (tmp_path / "ca.pem").unlink()
    key = (tmp_path / "ca.key").read_bytes()
    assert "ca.pem" in make_keys(tmp_path, "--learner", "us", status=1)
    assert [file.name for file in tmp_path.iterdir()] == ["ca.key"]
    assert (tmp_path / "ca.key").read_bytes() == key


def test_a_certificate_of_another_authority_is_not_kept(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        make_keys(tmp_path / folder, "--learner", "us")
    for ending in ("pem", "key"):
        shutil.copy(tmp_path / "one" / f"us.{ending}", tmp_path / "two" / f"us.{ending}")
    assert "comes from another authority" in make_keys(tmp_path / "two", "--learner", "us", status=1)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--server", "a.example:50051"), "without a port"),
        (("--server", "../a"), "a host name or an IP address"),
        (("--server", "a,"), "a host name or an IP address"),
        (("--learner", "../us"), "not legal"),
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


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("precious")
    folder = tmp_path / "keys"
    folder.mkdir()
    for link in ("us.key", ".us.key.partial"):
        (folder / link).symlink_to(tmp_path / "precious")
    make_keys(folder, "--learner", "us", "--renew")
    assert (tmp_path / "precious").read_text() == "precious"
    assert not (folder / "us.key").is_symlink()
