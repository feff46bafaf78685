"""The benchmarks of the data path still run; `make bench` has the figures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.report import DIRECTORY

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


@pytest.mark.parametrize("table", ["codec", "transfer", "merge"])
def test_a_table_is_measured(table: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    command = [sys.executable, "-m", "benchmarks.speed", table, "--quick"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    assert f"{table}: " in result.stdout + result.stderr


def test_a_killed_learner_comes_back_over_both_links() -> None:
    command = [sys.executable, "-m", "benchmarks.join", "--millions", "1", "--samples", "1"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    rows = json.loads((DIRECTORY / "join.json").read_text())
    returns = [row for row in rows if row["metric"] == "kill -9 to next merged delta"]
    assert [row["case"].partition(", ")[2] for row in returns] == ["loopback", "2 Gbit/s, 100 ms"]
