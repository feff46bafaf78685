"""Keys of a private deployment, as `skerry keys` makes them."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner

from skerry.cli.keys import keys
from skerry.net.tls import Tls


def make_keys(folder: Path, *words: str, status: int = 0) -> str:
    """Returns what `skerry keys` says when it is given a folder and options."""
    result = CliRunner().invoke(keys, [str(folder), *words])
    assert result.exit_code == status, result.output
    return result.output


def tls_of(folder: Path, name: str | None = None, *, ca: bool = True) -> Tls:
    """Returns the files of one end: a name's certificate, and the authority if it is to be trusted."""
    pair = (None, None) if name is None else (folder / f"{name}.pem", folder / f"{name}.key")
    return Tls(folder / "ca.pem" if ca else None, *pair)


def replace_pair(folder: Path, name: str, source: Path) -> None:
    """Gives `name` the certificate and key that it has in another folder."""
    for ending in ("key", "pem"):
        (folder / f"{name}.{ending}").write_bytes((source / f"{name}.{ending}").read_bytes())
