"""`skerry serve` on the command line: what it refuses before it listens."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from skerry.syncer.command import serve


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
    result = CliRunner().invoke(serve, ["--listen", "127.0.0.1:0", "--store", url])
    assert result.exit_code == 2
    assert says in result.output


def test_a_store_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = CliRunner().invoke(serve, ["--listen", "127.0.0.1:0", "--store", (tmp_path / "file").as_uri()])
    assert result.exit_code == 2


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0", "192.0.2.7:50051", "example.net:50051"])
def test_plaintext_on_an_address_that_others_reach_wants_to_be_asked_for(listen: str) -> None:
    result = CliRunner().invoke(serve, ["--listen", listen, "--store", "memory://"])
    assert result.exit_code == 2
    assert "--insecure" in result.output


@pytest.mark.parametrize("listen", ["", "50051", "127.0.0.1", "127.0.0.1:http"])
def test_an_address_without_a_port_is_refused(listen: str) -> None:
    result = CliRunner().invoke(serve, ["--listen", listen, "--store", "memory://"])
    assert result.exit_code == 2
    assert "HOST:PORT" in result.output
