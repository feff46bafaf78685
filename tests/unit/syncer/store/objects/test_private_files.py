"""What is written is its owner's alone, and no link leads the writer astray."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from skerry.runtime.files import replacing
from skerry_syncer.store.objects.opening import open_objects


def _modes(root: Path) -> dict[str, int]:
    return {str(path): stat.S_IMODE(path.stat().st_mode) for path in (root, *root.rglob("*"))}


async def test_nobody_else_can_read_a_store(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        objects = open_objects(f"file://{tmp_path}/store", reserve=True)
        await objects.create("runs/a/log", b"x")
        await objects.write("runs/a/blob", b"x")
    finally:
        os.umask(old)
    assert {name: mode for name, mode in _modes(tmp_path / "store").items() if mode & 0o077} == {}


async def test_what_a_new_store_puts_into_a_volume_is_its_owners(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        await open_objects(f"file://{tmp_path}", new=True).create("runs/a/log", b"x")
    finally:
        os.umask(old)
    modes = _modes(tmp_path)
    modes.pop(str(tmp_path))  # the volume's own mode is its operator's matter
    assert {name: mode for name, mode in modes.items() if mode & 0o077} == {}


def test_a_file_takes_the_place_of_a_link_and_not_of_what_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "out").symlink_to(tmp_path / "precious")
    with replacing(tmp_path / "out") as file:
        file.write(b"new")
    assert (tmp_path / "precious").read_text() == "precious"
    assert (tmp_path / "out").read_text() == "new"
    assert not (tmp_path / "out").is_symlink()


def test_after_an_error_the_old_file_is_there_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("old")

    def fail() -> None:
        with replacing(tmp_path / "out") as file:
            file.write(b"new")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]
