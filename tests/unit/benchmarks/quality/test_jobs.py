"""Jobs on several cores: what one of them breaks, and what the others keep."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.quality.arms import DataParallel, Job
from benchmarks.quality.jobs import Outcomes, run_jobs

pytestmark = [pytest.mark.long, pytest.mark.timeout(120)]


def test_a_failure_is_told_once_the_jobs_at_work_are_kept_and_no_other_begins(tmp_path: Path) -> None:
    path = tmp_path / "outcomes.jsonl"
    fails = Job(DataParallel(1, 500, 1e-3, task="no such"), 0)
    works = [Job(DataParallel(1, steps, 1e-3), 0) for steps in range(3, 15)]
    with pytest.raises(RuntimeError, match="job failed"):
        run_jobs([fails, *works], Outcomes(path), process_count=2)
    kept = set(Outcomes(path))
    assert kept < set(works)
    assert kept
