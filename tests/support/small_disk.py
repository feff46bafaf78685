"""A file system that is really small, and so can really be full."""

from __future__ import annotations

import contextlib
import gc
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """Makes `folder` a file system of 24 MiB; skips the test where that takes rights that it lacks."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("needs root to mount a small disk")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(disk: Path) -> None:
    """Takes the rest of the disk, the files of deltas that did not fit included, which are closed late."""
    gc.collect()
    with (disk / "of others").open("wb", buffering=0) as file:
        for _ in range(24 * 2**8):
            with contextlib.suppress(OSError):
                file.write(b"\0" * 2**12)
