"""The benchmarks of the data path still run; `make bench` has the figures."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    ("benchmark", "table", "options"),
    [
        *(("speed", table, ()) for table in ("codec", "transfer", "merge")),
        *(("gpu", table, ("--device", "cpu")) for table in ("encoding", "steps", "programs")),
    ],
)
def test_a_table_is_measured(
    benchmark: str, table: str, options: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    command = [sys.executable, "-m", f"benchmarks.{benchmark}", table, "--quick", *options]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    assert f"{table}: " in result.stdout + result.stderr
