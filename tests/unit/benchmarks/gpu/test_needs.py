"""What is missing is named before anything is imported that may be missing."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

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


def test_the_wheels_to_take_along_are_all_that_the_product_needs_in_the_versions_that_it_is_tested_with() -> None:
    text = (ROOT / "benchmarks" / "gpu" / "README.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^python3 -m pip download ((?:.*\\\n)*.*)\n", text, re.MULTILINE)
    words = block.replace("\\\n", " ").split()
    assert words[words.index("-c") + 1] == "constraints.txt"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = {Requirement(line).name for line in project["dependencies"]}
    assert needed - {"numba", "numpy"} <= set(words)
    assert not [word for word in words if re.search("[<=>]", word) and not word.startswith("-")]
