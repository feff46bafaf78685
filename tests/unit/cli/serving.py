"""`skerry serve` in a process of its own."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """Yields the address of `skerry serve` on an empty store in `folder`."""
    words = ["serve", "--new-store", "--listen", "127.0.0.1:0", "--store", f"file://{folder}/data"]
    words += ["--log-level", "error"]
    command = [sys.executable, "-m", "skerry.cli", *words]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        found = re.match(r"listening on ([\d.:]+),", process.stdout.readline())
        try:
            assert found is not None, "the syncer has not started"
            yield found[1]
        finally:
            process.terminate()
            process.communicate(timeout=30)
