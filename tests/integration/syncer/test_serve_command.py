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

MEMORY = ("--store", "memory://")
PAIR = ("--tls-cert", "{keys}/a.example.pem", "--tls-key", "{keys}/a.example.key")
# Where it tries to listen, the address is one for documentation, which no machine has.
REFUSED: list[tuple[tuple[str, ...], str]] = [
    (("--new-store", "--store", "ftp://nowhere"), "scheme is not known"),
    (("--new-store", "--store", "s3://"), "needs a bucket"),
    (("--new-store", "--store", "file:///proc/no/such/place"), "can't be used"),
    (("--new-store", "--store", "just-a-word"), "no scheme"),
    (("--new-store", "--store", "file://{keys}/ca.pem"), "can't be used"),
    *(
        ((*MEMORY, "--listen", listen), "HOST:PORT")
        for listen in ("", "50051", "127.0.0.1", "127.0.0.1:x", "127.0.0.1:99999")
    ),
    *(
        ((*MEMORY, "--listen", listen), way)
        for listen in ("0.0.0.0:0", "[::]:0", "192.0.2.7:50051", "example.net:50051")
        for way in ("skerry keys", "--tls-cert", "127.0.0.1", "--insecure")
    ),
    ((*MEMORY, "--listen", "192.0.2.7:50051", *PAIR), "can't listen on the address"),
    ((*MEMORY, "--metrics", "192.0.2.7:9464"), "can't listen on the address. metrics=192.0.2.7:9464"),
    ((*MEMORY, "--tls-cert", "{keys}/a.example.pem"), "must be given together"),
    ((*MEMORY, "--tls-key", "{keys}/a.example.key"), "must be given together"),
    ((*MEMORY, "--tls-client-ca", "{keys}/ca.pem"), "needs the server's own certificate"),
    ((*MEMORY, *PAIR[:3], "{keys}/us.key"), "is not that of the certificate"),
    ((*MEMORY, "--tls-cert", "{keys}/a.example.key", *PAIR[2:]), "must hold a certificate in PEM form"),
    ((*MEMORY, *PAIR[:3], "{keys}/nowhere"), "No such file or directory"),
    ((*MEMORY, "--tls-cert", "{keys}/us.pem", "--tls-key", "{keys}/us.key"), "--tls-cert is a client's certificate"),
]


def test_options_that_can_not_be_right_are_said_before_it_listens(tmp_path: Path) -> None:
    make_keys(tmp_path, "--server", "a.example", "--learner", "us")
    for words, reason in REFUSED:
        result = CliRunner().invoke(serve, ["--listen", "127.0.0.1:0", *(word.format(keys=tmp_path) for word in words)])
        assert (words, result.exit_code) == (words, 2)
        assert reason in result.output, words


@pytest.mark.parametrize("words", [[], ["--store", "file://mount"], ["--store", "file://mount/store"]])
def test_a_store_is_begun_only_if_asked_for(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mount").mkdir()
    result = CliRunner().invoke(serve, ["--listen", "127.0.0.1:0", *words])
    assert result.exit_code == 2
    assert "there is no store" in result.output
    assert "`skerry serve --new-store` begins a new store." in result.output
    assert [path.name for path in tmp_path.rglob("*")] == ["mount"]


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
