"""`skerry serve` on the command line: what it refuses before it listens."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from skerry_syncer.command import serve
from tests.support.made_keys import make_keys
from tests.support.serve_process import ServeProcess


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("ftp://nowhere", "scheme is not known"),
        ("s3://", "needs a bucket"),
        ("file:///proc/no/such/place", "can't be used"),
        ("just-a-word", "no scheme"),
    ],
)
def test_a_store_url_that_can_not_be_used_is_said(url: str, says: str) -> None:
    result = CliRunner().invoke(serve, ["--listen", "127.0.0.1:0", "--new-store", "--store", url])
    assert result.exit_code == 2
    assert says in result.output


@pytest.mark.parametrize("words", [[], ["--store", "file://mount"], ["--store", "file://mount/store"]])
def test_a_store_is_begun_only_if_asked_for(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mount").mkdir()
    result = CliRunner().invoke(serve, ["--listen", "127.0.0.1:0", *words])
    assert result.exit_code == 2
    assert "there is no store" in result.output
    assert "`skerry serve --new-store` begins a new store." in result.output
    assert [path.name for path in tmp_path.rglob("*")] == ["mount"]


def test_a_store_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = CliRunner().invoke(serve, ["--listen", "127.0.0.1:0", "--store", (tmp_path / "file").as_uri()])
    assert result.exit_code == 2


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0", "192.0.2.7:50051", "example.net:50051"])
def test_plaintext_on_an_address_that_others_reach_wants_to_be_asked_for(listen: str) -> None:
    result = CliRunner().invoke(serve, ["--listen", listen, "--store", "memory://"])
    assert result.exit_code == 2
    for way in ("skerry keys", "--tls-cert", "127.0.0.1", "--insecure"):
        assert way in result.output


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--tls-cert", "a.example.pem"], "must be given together"),
        (["--tls-key", "a.example.key"], "must be given together"),
        (["--tls-client-ca", "ca.pem"], "needs the server's own certificate"),
        (["--tls-cert", "a.example.pem", "--tls-key", "us.key"], "is not that of the certificate"),
        (["--tls-cert", "a.example.key", "--tls-key", "a.example.key"], "must hold a certificate in PEM form"),
        (["--tls-cert", "a.example.pem", "--tls-key", "nowhere"], "No such file or directory"),
        (["--tls-cert", "us.pem", "--tls-key", "us.key"], "--tls-cert is a client's certificate"),
    ],
)
def test_tls_files_that_do_not_fit_are_said_before_it_listens(options: list[str], says: str, tmp_path: Path) -> None:
    make_keys(tmp_path, "--server", "a.example", "--learner", "us")
    paths = [word if word.startswith("--") else str(tmp_path / word) for word in options]
    result = CliRunner().invoke(serve, ["--listen", "127.0.0.1:0", "--store", "memory://", *paths])
    assert result.exit_code == 2
    assert says in result.output


def test_with_tls_an_address_that_others_reach_wants_no_more(tmp_path: Path) -> None:
    make_keys(tmp_path, "--server", "a.example")
    pair = ["--tls-cert", str(tmp_path / "a.example.pem"), "--tls-key", str(tmp_path / "a.example.key")]
    # An address for documentation, which no machine has.
    result = CliRunner().invoke(serve, ["--listen", "192.0.2.7:50051", "--store", "memory://", *pair])
    assert "can't listen on the address" in result.output


def test_metrics_beyond_loopback_take_no_switch_that_permits_plaintext_calls() -> None:
    # An address for documentation, which no machine has: the syncer tried to listen there.
    result = CliRunner().invoke(serve, ["--metrics", "192.0.2.7:9464", "--store", "memory://"])
    assert "can't listen on the address. metrics=192.0.2.7:9464" in result.output


@pytest.mark.parametrize("listen", ["", "50051", "127.0.0.1", "127.0.0.1:http", "127.0.0.1:99999"])
def test_an_address_without_a_port_is_refused(listen: str) -> None:
    result = CliRunner().invoke(serve, ["--listen", listen, "--store", "memory://"])
    assert result.exit_code == 2
    assert "HOST:PORT" in result.output


@pytest.mark.parametrize("option", ["--listen", "--metrics"])
def test_a_port_that_is_taken_is_said_in_one_line_and_no_store_is_made(option: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        words = [
            "serve",
            "--new-store",
            "--listen",
            "127.0.0.1:0",
            option,
            address,
            "--store",
            f"file://{tmp_path}/store",
        ]
        done = subprocess.run(
            [sys.executable, "-m", "skerry.cli", *words], cwd=tmp_path, capture_output=True, text=True, check=False
        )
    assert done.returncode == 2
    usage, error, advice = done.stderr.splitlines()
    assert usage.startswith("Usage: ")
    assert f"{option.removeprefix('--')}={address}, because=Address already in use" in error
    assert advice.startswith("next: ")
    assert not (tmp_path / "store").exists()


async def test_a_port_file_follows_no_link(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("precious")
    for name in ("port", ".port.partial"):
        (tmp_path / name).symlink_to(tmp_path / "precious")
    process = ServeProcess("memory://", tmp_path, port=0)
    try:
        await process.start("--port-file", str(tmp_path / "port"))
        process.terminate()
        await process.exit_status()
    finally:
        await process.stop()
    assert (tmp_path / "precious").read_text() == "precious"
    assert (tmp_path / "port").read_text() == f"{process.port}\n"


async def test_neither_output_nor_log_shows_the_secrets_of_the_store(tmp_path: Path) -> None:
    process = ServeProcess("memory://user:hunter2@x?secret_key=hunter2", tmp_path)
    try:
        await process.start()
        process.terminate()
        await process.exit_status()
    finally:
        await process.stop()
    assert "hunter2" not in process.first_line + (tmp_path / "serve.log").read_text()
