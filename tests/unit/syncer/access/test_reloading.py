"""A file that is read again and again is taken up when it changes, and parsed only then."""

from __future__ import annotations

from pathlib import Path

from skerry_syncer.access.reloading import Reloaded
from tests.support.made_keys import make_keys, replace_pair, tls_of


def test_certificates_that_have_not_changed_are_not_checked_again(tmp_path: Path) -> None:
    """Checking a private key takes up to a quarter of a second, and anybody can open a connection."""
    make_keys(tmp_path, "--server", "a.example")
    files = Reloaded("certificates", tls_of(tmp_path, "a.example").read)
    begun = files.value
    assert files.now() is begun
    make_keys(tmp_path / "new", "--server", "a.example")
    replace_pair(tmp_path, "a.example", tmp_path / "new")
    assert files.now() == tls_of(tmp_path, "a.example").read() != begun
