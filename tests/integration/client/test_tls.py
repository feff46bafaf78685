"""Clients with TLS: learners and commands get in, and whoever does not is told why and what to do."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from skerry import ArrayLearner, RunsClient, SkerryError, Tls, TryAgainError
from skerry.cli import failures
from skerry.cli.main import cli
from skerry.net.grpc_transport import GrpcTransport
from skerry.net.tls import tls_for
from skerry.v1 import capabilities_pb2
from tests.support.heard_logs import heard_logs
from tests.support.made_keys import make_keys, replace_pair, tls_of
from tests.support.quadratic import Quadratic
from tests.support.syncer_thread import syncer

ASK = capabilities_pb2.GetCapabilitiesRequest()


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority, a server's certificate and its clients'."""
    folder = tmp_path_factory.mktemp("keys")
    make_keys(folder, "--server", "a.example", "--learner", "us", "--learner", "eu", "--admin", "anna")
    return folder


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The keys of another deployment."""
    folder = tmp_path_factory.mktemp("others")
    make_keys(folder, "--learner", "us")
    return folder


@pytest.fixture(scope="module")
def secured(keys: Path) -> Iterator[str]:
    """Where a syncer with mutual TLS listens, for all tests."""
    with syncer(tls_of(keys, "a.example")) as target:
        yield target


def refusal(target: str, tls: Tls | None) -> SkerryError:
    """Returns the error of a call that fails, which it must do soon."""
    started_s = time.monotonic()
    with RunsClient(target, tls=tls) as client, pytest.raises(TryAgainError) as caught:
        client.list_runs()
    assert time.monotonic() - started_s < 5
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize(("owner", "learner_id"), [("eu", "us"), ("anna", "us"), ("eu", None)])
def test_a_certificate_of_another_client_is_refused_before_anything_is_sent(
    owner: str, learner_id: str | None, keys: Path, secured: str, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"target": secured, "run": "other", "learner_id": learner_id, "create": True}
    started_s = time.monotonic()
    with contextlib.chdir(tmp_path), pytest.raises(ValueError, match=f"another.*learner_id={learner_id}, run=other"):
        ArrayLearner(Quadratic().arrays, tls=tls_of(keys, owner), **options)
    assert time.monotonic() - started_s < 2
    with RunsClient(secured, tls=tls_of(keys, "anna")) as client:
        assert client.list_runs() == []
    assert list(tmp_path.iterdir()) == []


_UNTRUSTED = """
import sys
from skerry import RunsClient, SkerryError, Tls
target, ca = sys.argv[1:]
try:
    with RunsClient(target, tls=Tls(ca)) as client:
        client.list_runs()
except SkerryError as error:
    print(error.reason)
"""


def test_a_program_does_not_show_what_grpc_logs(secured: str, others: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    words = [sys.executable, "-c", _UNTRUSTED, secured, str(others / "ca.pem")]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("TLS_FAILED\n", "")


REFUSALS: dict[str, tuple[Callable[[Path, Path], Tls | None], str, str]] = {
    "no certificate": (lambda keys, _: tls_of(keys), "TLS_FAILED", "give --tls-cert and --tls-key"),
    "a certificate of another authority": (
        lambda keys, others: replace(tls_of(others, "us"), ca=keys / "ca.pem"),
        "TLS_FAILED",
        "refuses the client's certificate",
    ),
    "another authority's server": (
        lambda keys, others: replace(tls_of(keys, "us"), ca=others / "ca.pem"),
        "TLS_FAILED",
        "does not come from an authority that this client trusts: give --tls-ca",
    ),
    "no public authority": (lambda *_: Tls(), "TLS_FAILED", "give --tls-ca"),
    "plaintext": (lambda *_: None, "UNREACHABLE", "If it uses TLS, this client must too: give --tls-ca"),
}


@pytest.mark.parametrize("kind", REFUSALS)
def test_who_is_not_let_in_is_told_what_to_do(kind: str, keys: Path, others: Path, secured: str) -> None:
    tls_from, reason, advice = REFUSALS[kind]
    error = refusal(secured, tls_from(keys, others))
    assert error.reason == reason
    assert advice in str(error)


def test_a_server_that_is_another_one_or_none_is_told_from_one_that_refuses(keys: Path, target: str) -> None:
    with syncer(tls_of(keys, "a.example"), host="127.0.0.2") as renamed:  # loopback too, but not in the certificate
        assert "is not valid for the host in --target" in str(refusal(renamed, tls_of(keys, "us")))
    assert "the server does not use TLS and this client does" in str(refusal(target, tls_of(keys)))
    assert "Connection refused" in str(refusal("127.0.0.1:1", tls_of(keys)))


_HERE = "localhost:1 127.0.0.1:1 127.9.9.9:1 [::1]:1 unix:/run/skerry.sock dns:///localhost:1 ipv4:127.0.0.1:1"
_AWAY = (
    "syncer.example:1 localhost.example:1 127.0.0.1.example:1 10.0.0.1:1 0.0.0.0:1 [2001:db8::1]:1 "
    "dns://127.0.0.1/syncer.example:1 ipv4:10.0.0.1:1"
)


@pytest.mark.parametrize(("addresses", "default"), [(_HERE, None), (_AWAY, Tls())])
def test_only_what_stays_on_this_machine_is_plaintext_by_default(addresses: str, default: Tls | None) -> None:
    for address in addresses.split():
        assert tls_for(address, None) == default, address
        assert tls_for(address, "insecure") is None
        assert tls_for(address, Tls("ca.pem")) == Tls("ca.pem")


@pytest.mark.parametrize(
    ("tls", "says"),
    [
        ({"ca": "nowhere.pem"}, "can't be read; give its right path.*nowhere.pem, because=No such file"),
        ({"ca": "us.key"}, "must hold a certificate in PEM form.*us.key"),
        ({"cert": "us.pem", "key": "us.pem"}, "must hold a private key without a password in PEM form.*us.pem"),
        ({"cert": "us.pem", "key": "eu.key"}, "the private key is not that of the certificate.*us.pem.*eu.key"),
        ({"cert": "us.pem"}, "a certificate and its key must be given together.*key=None"),
    ],
)
def test_files_that_can_not_be_used_are_an_error_before_any_call(tls: Mapping[str, str], says: str, keys: Path) -> None:
    files: dict[str, Any] = {name: keys / file for name, file in tls.items()}
    with pytest.raises(ValueError, match=says):
        RunsClient("127.0.0.1:1", tls=Tls(**files))


def test_a_learner_says_why_it_waits_and_ends_with_the_reason(keys: Path, secured: str) -> None:
    options: dict[str, Any] = {"target": secured, "run": "fit", "learner_id": "us", "connect_timeout_s": 2.0}
    with heard_logs() as logs, pytest.raises(TryAgainError, match="refuses the client's certificate"):
        ArrayLearner(Quadratic().arrays, tls=tls_of(keys), **options)
    (said,) = [entry for entry in logs if entry["event"] == "no syncer answers yet, trying again"]
    assert "give --tls-cert and --tls-key" in said["because"]


async def test_a_client_that_connects_again_takes_the_renewed_files(keys: Path, tmp_path: Path, secured: str) -> None:
    held = tmp_path / "held"
    make_keys(held, "--learner", "us")
    transport = GrpcTransport(secured, tls=tls_of(held, "us"))
    with pytest.raises(TryAgainError, match="does not come from an authority"):
        await transport.ask(lambda stubs: stubs.capabilities.GetCapabilities, ASK, timeout_s=10)
    replace_pair(held, "us", keys)
    (held / "ca.pem").write_bytes((keys / "ca.pem").read_bytes())
    await transport.ask(lambda stubs: stubs.capabilities.GetCapabilities, ASK, timeout_s=10)
    await transport.close()


def test_a_command_takes_its_files_and_plaintext_from_its_options(
    keys: Path, secured: str, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [f"--tls-ca={keys}/ca.pem", f"--tls-cert={keys}/anna.pem", f"--tls-key={keys}/anna.key"]
    elsewhere = target.replace("127.0.0.1", "0.0.0.0")  # connections to it end here, and nothing says so
    for words, status in (
        ((secured, *files), 0),
        ((secured, *files[:2]), 2),
        ((elsewhere, "--insecure"), 0),
        ((elsewhere, *files, "--insecure"), 4),  # the stricter of two wishes
        ((elsewhere,), 4),
    ):
        assert failures.run(cli, ["runs", "list", "--json", "--target", *words]) == status, capsys.readouterr()
    assert "[TLS_FAILED]" in (said := capsys.readouterr().err)
    assert "needs --insecure then (in Python tls='insecure')" in said
