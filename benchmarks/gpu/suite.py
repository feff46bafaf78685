"""The tests of the suite that need CUDA, by pytest in a process of its own."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator

from benchmarks.gpu.part_run import PartRun
from benchmarks.processes import ROOT, environment, this_python
from benchmarks.report import Row, measured


def rows(run: PartRun) -> Iterator[Row]:
    """How many pass, fail and are skipped."""
    files = sorted(str(path) for path in (ROOT / "tests").rglob("test_*.py") if "mark.cuda" in path.read_text())
    options = ["-o", "addopts=--import-mode=importlib", "-q", "-rs", "-p", "no:cacheprovider", "-m", "cuda"]
    result = subprocess.run(
        this_python("pytest", *options, *files),
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=environment(),
        timeout=run.left_s,
    )
    if result.returncode:
        sys.stderr.write(result.stdout[-8000:] + result.stderr[-2000:])
    last = (result.stdout.splitlines() or [""])[-1]
    counts = {word: int(count) for count, word in re.findall(r"(\d+) (\w+)", last)}
    for word in ("passed", "failed", "skipped"):
        yield measured("tests that need CUDA", word, [float(counts.get(word, 0))], "")
    has_run = counts.get("passed", 0) > 0 or run.device.type == "cpu"
    ends_well = float(has_run and not result.returncode)
    yield measured("tests that need CUDA", "pytest ends well (1: yes)", [ends_well], "", limit=1.0)
