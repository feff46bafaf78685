"""A learner that lies costs the honest ones at most 5 %: two rows of `benchmarks.quality.liars`, shorter."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.quality.arms import Outcome
from benchmarks.quality.liars import BOUND_PERCENT, arm, percent_over
from benchmarks.quality.lies import LIES
from benchmarks.quality.world import train_islands

STEPS = 40


def lived(learner_count: int, merge: str, lie: str | None = None) -> Outcome:
    return train_islands(replace(arm(learner_count, merge), step_count=STEPS), 0, None if lie is None else LIES[lie])


@pytest.fixture(scope="module")
def honest() -> Outcome:
    return lived(2, "rda")


@pytest.mark.parametrize(
    ("merge", "lie"),
    [
        pytest.param("rda", "×−29", id="rda"),
        pytest.param("geometric-median", "claims 2^32 tokens a step, flipped", id="median", marks=pytest.mark.long),
    ],
)
def test_one_liar_of_three_costs_at_most_the_bound(honest: Outcome, merge: str, lie: str) -> None:
    outcome = lived(3, merge, lie)
    assert percent_over(outcome, honest) < BOUND_PERCENT
    assert outcome.figures["quarantined_honest"] == 0
