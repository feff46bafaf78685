"""Clients with TLS: learners and commands get in, and whoever does not is told why and what to do."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from skerry import ArrayLearner, RefusedError, RunsClient, SkerryError, Tls, TryAgainError
from skerry.cli import failures
from skerry.cli.main import cli
from skerry.net.grpc_transport import GrpcTransport
from skerry.net.tls import tls_for
from skerry.runtime.clock import SystemClock
from skerry.v1 import capabilities_pb2
from skerry_syncer.access.deny_list import DenyList
from tests.support.heard_logs import heard_logs
from tests.support.made_keys import make_keys, replace_pair, tls_of
from tests.support.quadratic import QUICK, Quadratic, train_until
from tests.support.syncer_thread import syncer

# Connections to it end on this machine, and nothing says so.
_ELSEWHERE = "0.0.0.0"
ASK = capabilities_pb2.GetCapabilitiesRequest()


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority, a server's certificate and its clients'."""
    folder = tmp_path_factory.mktemp("keys")
    make_keys(folder, "--server", "a.example", "--learner", "us", "--learner", "eu", "--admin", "anna")
    return folder


@pytest.fixture(scope="module")
def secured(keys: Path) -> Iterator[str]:
    """Where a syncer with mutual TLS listens, for all tests."""
    with syncer(tls_of(keys, "a.example")) as target:
        yield target


class Commands:
    """`skerry` commands, run in a folder as a person would."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self._capsys, self._monkeypatch = capsys, monkeypatch
        monkeypatch.chdir(folder)

    def __call__(self, *words: str, status: int = 0, env: Mapping[str, str] | None = None) -> str:
        """Returns what a command prints, which ends with that status."""
        with self._monkeypatch.context() as patch:
            for name, value in (env or {}).items():
                patch.setenv(name, value)
            ended = failures.run(cli, list(words))
        printed = "".join(self._capsys.readouterr())
        assert ended == status, printed
        return printed


@pytest.fixture
def skerry(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Commands:
    """The commands, in an empty folder."""
    return Commands(capsys, monkeypatch, tmp_path)


def refusal(target: str, tls: Tls | None) -> SkerryError:
    """Returns the error of a call that fails, which it must do soon."""
    started_s = time.monotonic()
    with RunsClient(target, tls=tls) as client, pytest.raises(TryAgainError) as caught:
        client.list_runs()
    assert time.monotonic() - started_s < 5
    assert "\n" not in str(caught.value)
    return caught.value


def test_learners_train_one_model_over_mutual_tls(keys: Path) -> None:
    problem, other = Quadratic(), Quadratic(1)
    with syncer(tls_of(keys, "a.example")) as target:
        options: dict[str, Any] = {"target": target, "run": "fit", "create": True, "policy": QUICK}
        with (
            ArrayLearner(problem.arrays, learner_id="us", tls=tls_of(keys, "us"), **options) as us,
            ArrayLearner(other.arrays, learner_id="eu", tls=tls_of(keys, "eu"), **options) as eu,
        ):
            train_until([(problem, us), (other, eu)], lambda: min(us.stats.deltas_merged, eu.stats.deltas_merged) > 3)
        with RunsClient(target, tls=tls_of(keys, "anna")) as client:
            assert [run.name for run in client.list_runs()] == ["fit"]


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


def test_neither_a_program_nor_a_command_shows_what_grpc_logs(secured: str, tmp_path: Path) -> None:
    make_keys(tmp_path / "other")
    ca = str(tmp_path / "other" / "ca.pem")
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    words = [sys.executable, "-c", _UNTRUSTED, secured, ca]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("TLS_FAILED\n", "")
    words = [sys.executable, "-m", "skerry.cli", "runs", "list", "--target", secured, "--tls-ca", ca]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    error, advice = done.stderr.splitlines()
    assert error.startswith("error: the server's certificate does not come from an authority")
    assert advice.startswith("next: ")


def test_a_learner_that_is_denied_hears_it_at_once(keys: Path, tmp_path: Path) -> None:
    (tmp_path / "denied").write_text("skerry://learner/us\n")
    denied = DenyList(tmp_path / "denied", SystemClock())
    with syncer(tls_of(keys, "a.example"), deny_list=denied) as target:
        started_s = time.monotonic()
        with pytest.raises(RefusedError, match="deny list") as caught:
            ArrayLearner(Quadratic().arrays, target=target, run="fit", learner_id="us", tls=tls_of(keys, "us"))
    assert caught.value.reason == "PERMISSION_DENIED"
    assert time.monotonic() - started_s < 10


def test_several_replicas_are_reached_with_tls(keys: Path, secured: str) -> None:
    with (
        syncer(tls_of(keys, "a.example")) as second,
        RunsClient(f"{secured},{second}", tls=tls_of(keys, "anna")) as client,
    ):
        assert [client.list_runs() for _ in range(4)] == [[]] * 4


@pytest.mark.parametrize("own", ["none", "of another authority"])
def test_a_client_whose_certificate_is_refused_is_told(own: str, keys: Path, tmp_path: Path, secured: str) -> None:
    make_keys(tmp_path / "others", "--learner", "us")
    others = replace(tls_of(tmp_path / "others", "us"), ca=keys / "ca.pem")
    error = refusal(secured, tls_of(keys) if own == "none" else others)
    assert error.reason == "TLS_FAILED"
    assert "refuses the client's certificate" in str(error)
    assert "give --tls-cert and --tls-key" in str(error)


def test_a_server_of_another_authority_is_not_trusted(keys: Path, tmp_path: Path, secured: str) -> None:
    make_keys(tmp_path / "others")
    error = refusal(secured, replace(tls_of(keys, "us"), ca=tmp_path / "others" / "ca.pem"))
    assert error.reason == "TLS_FAILED"
    assert "does not come from an authority that this client trusts: give --tls-ca" in str(error)
    assert refusal(secured, Tls()).reason == "TLS_FAILED", "it is no public authority either"


def test_a_server_with_another_name_is_not_trusted(keys: Path) -> None:
    with syncer(tls_of(keys, "a.example"), host="127.0.0.2") as target:  # loopback too, but not in the certificate
        error = refusal(target, tls_of(keys, "us"))
    assert error.reason == "TLS_FAILED"
    assert "is not valid for the host in --target" in str(error)
    assert "skerry keys DIR --server HOST" in str(error)


def test_a_plaintext_client_of_a_server_with_tls_is_told(secured: str) -> None:
    error = refusal(secured, None)
    assert error.reason == "UNREACHABLE"
    assert "If it uses TLS, this client must too: give --tls-ca" in str(error)


def test_a_tls_client_of_a_plaintext_server_is_told(keys: Path, target: str) -> None:
    error = refusal(target, tls_of(keys))
    assert error.reason == "TLS_FAILED"
    assert "the server does not use TLS and this client does" in str(error)
    assert "leave out this client's TLS options" in str(error)


def test_a_port_where_nobody_listens_is_no_matter_of_tls(keys: Path) -> None:
    error = refusal("127.0.0.1:1", tls_of(keys))
    assert error.reason == "UNREACHABLE"
    assert "Connection refused" in str(error)


@pytest.mark.parametrize(
    ("address", "is_here"),
    [
        ("localhost:1", True),
        ("127.0.0.1:1", True),
        ("127.9.9.9:1", True),
        ("[::1]:1", True),
        ("unix:/run/skerry.sock", True),
        ("dns:///localhost:1", True),
        ("ipv4:127.0.0.1:1", True),
        ("syncer.example:1", False),
        ("localhost.example:1", False),
        ("127.0.0.1.example:1", False),
        ("10.0.0.1:1", False),
        ("0.0.0.0:1", False),
        ("[2001:db8::1]:1", False),
        ("dns://127.0.0.1/syncer.example:1", False),
        ("ipv4:10.0.0.1:1", False),
    ],
)
def test_only_what_stays_on_this_machine_is_plaintext_by_default(address: str, is_here: bool) -> None:
    assert tls_for(address, None) == (None if is_here else Tls())
    assert tls_for(address, "insecure") is None
    assert tls_for(address, Tls("ca.pem")) == Tls("ca.pem")


def test_a_target_elsewhere_is_called_with_tls_unless_plaintext_is_asked_for_by_name(
    target: str, skerry: Commands
) -> None:
    elsewhere = target.replace("127.0.0.1", _ELSEWHERE)
    error = refusal(elsewhere, None)
    assert error.reason == "TLS_FAILED"
    assert "needs --insecure then (in Python tls='insecure')" in str(error)
    options: dict[str, Any] = {"target": elsewhere, "run": "fit", "learner_id": "us", "create": True}
    with pytest.raises(TryAgainError, match="needs --insecure then"):
        ArrayLearner(Quadratic().arrays, connect_timeout_s=2, **options)
    with RunsClient(elsewhere, tls="insecure") as client:
        assert client.list_runs() == []
    with pytest.raises(ValueError, match="tls='plain'"):
        RunsClient(elsewhere, tls="plain")  # type: ignore[arg-type]
    words = ("runs", "list", "--json", "--target", elsewhere)
    assert "[TLS_FAILED]" in skerry(*words, status=4)
    assert skerry(*words, "--insecure") == "[]\n"
    assert skerry(*words, env={"SKERRY_INSECURE": "true"}) == "[]\n"
    assert "[TLS_FAILED]" in skerry(*words, "--tls", "--insecure", status=4), "the stricter of two wishes"


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
        await transport.get_capabilities(ASK, timeout_s=10)
    replace_pair(held, "us", keys)
    (held / "ca.pem").write_bytes((keys / "ca.pem").read_bytes())
    await transport.get_capabilities(ASK, timeout_s=10)
    await transport.close()


def test_a_command_takes_its_files_from_options_the_environment_or_toml(
    keys: Path, secured: str, tmp_path: Path, skerry: Commands
) -> None:
    files = {"tls-ca": keys / "ca.pem", "tls-cert": keys / "anna.pem", "tls-key": keys / "anna.key"}
    words = ("runs", "list", "--json", "--target", secured)
    assert skerry(*words, *(word for name, file in files.items() for word in (f"--{name}", str(file)))) == "[]\n"
    env = {f"SKERRY_{name.upper().replace('-', '_')}": str(file) for name, file in files.items()}
    assert skerry(*words, env=env) == "[]\n"
    (tmp_path / "skerry.toml").write_text("".join(f'{name} = "{file}"\n' for name, file in files.items()))
    assert skerry(*words) == "[]\n"


def test_a_command_says_what_is_wrong_with_tls_and_what_to_do(keys: Path, secured: str, skerry: Commands) -> None:
    target, ca = ("--target", secured), ("--tls-ca", str(keys / "ca.pem"))
    refused = skerry("runs", "list", *target, *ca, status=4)
    assert re.search(r"^error: .*refuses the client's certificate.*\[TLS_FAILED\]$", refused, re.MULTILINE)
    assert "give --tls-cert and --tls-key" in refused
    watched = skerry("watch", "demo", "--patience", "1", *target, *ca, status=4)
    assert watched.count("reconnecting: the server closed the connection") == 1, "said once, not at each attempt"
    alone = skerry("runs", "list", *target, "--tls-cert", str(keys / "us.pem"), status=2)
    assert "must be given together" in alone
    of_another = ("--tls-cert", str(keys / "eu.pem"), "--tls-key", str(keys / "eu.key"))
    learning = skerry("learn", "fit", "--learner-id", "us", *target, *ca, *of_another, status=2)
    assert "error: the certificate is another client's" in learning
