"""The committed stubs are what the .proto files give."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_committed_stubs_are_up_to_date() -> None:
    command: list[str | Path] = [sys.executable, ROOT / "protos" / "generate.py", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "up to date" in done.stdout
