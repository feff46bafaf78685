"""What is made of the times that a learner tells."""

from __future__ import annotations

from typing import Any

from benchmarks.join.__main__ import STAGES, rows_of_returns


def _answer(stage_s: float) -> dict[str, Any]:
    stages = [stage for stage in STAGES if stage != "import torch"]
    at_s = {stage: stage_s * number for number, stage in enumerate(stages, 1)}
    cpu_s = {stage: at_s / 2 for stage, at_s in at_s.items()}
    return {"at_s": at_s, "cpu_s": cpu_s, "spent_s": {"digest": 0.5}, "size_bytes": 100_000_000}


def test_a_return_is_the_sum_of_its_stages_and_the_best_one_counts() -> None:
    rows = {row.metric: row for row in rows_of_returns("case", [_answer(3.0), _answer(1.0)], 2e9)}
    stages = [row.value for name, row in rows.items() if name.startswith("until") and "CPU" not in name]
    assert sum(stages) == rows["kill -9 to next merged delta"].value == len(stages)
    assert rows["until attached: CPU of the learner"].value == 0.5
    assert rows["until attached"].samples == (3.0, 1.0)


def test_the_limit_of_a_pull_is_a_round_trip_and_what_the_link_needs_for_the_bytes() -> None:
    rows = {row.metric.partition(",")[0]: row for row in rows_of_returns("case", [_answer(1.0)], 2e9)}
    assert (rows["pull"].value, rows["pull"].limit) == (2.0, 0.5)
    unlimited = {row.metric.partition(",")[0]: row for row in rows_of_returns("case", [_answer(1.0)], None)}
    assert unlimited["pull"].limit is None
