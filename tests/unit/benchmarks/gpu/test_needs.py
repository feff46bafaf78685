"""What is missing is named before anything is imported that may be missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.needs import unmet

ROOT = Path(__file__).parents[4]


def test_a_bare_python_is_told_all_that_it_lacks() -> None:
    command = [sys.executable, "-S", "-m", "benchmarks.gpu"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env={}, timeout=60)
    assert result.returncode == 1
    assert {"skerry", "torch", "numpy", "psutil", "pytest"} <= set(result.stderr.partition(". ")[0].split())


def test_a_version_that_is_too_old_is_named_and_does_not_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = unmet()
    monkeypatch.setattr("benchmarks.gpu.needs.metadata.version", lambda name: "0.1" if name == "numba" else "99")
    missing, others = unmet()
    assert installed == ([], [])
    assert not missing
    assert any(item.startswith("numba>=") and item.endswith("(here 0.1)") for item in others)
