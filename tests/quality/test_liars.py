"""A learner that is broken or lies costs the others at most 5 %: rows of `benchmarks.quality.liars`, shorter."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.quality.arms import Outcome
from benchmarks.quality.liars import BOUND_PERCENT, arm, percent_over
from benchmarks.quality.lies import BROKEN, LIES, Lie
from benchmarks.quality.world import train_islands

STEPS = 40
LONGER = 96  # as the benchmark's


def lived(learner_count: int, merge: str, lie: Lie | None = None, *, step_count: int = STEPS) -> Outcome:
    return train_islands(replace(arm(learner_count, merge), step_count=step_count), 0, lie)


@pytest.fixture(scope="module")
def honest() -> Outcome:
    return lived(2, "rda")


@pytest.fixture(scope="module")
def honest_for_longer() -> Outcome:
    return lived(2, "rda", step_count=LONGER)


@pytest.mark.parametrize(
    ("merge", "lie"),
    [
        pytest.param("rda", "×−29", id="rda"),
        pytest.param("geometric-median", "claims 2^32 tokens a step, flipped", id="median", marks=pytest.mark.long),
    ],
)
def test_one_liar_of_three_costs_at_most_the_bound(honest: Outcome, merge: str, lie: str) -> None:
    outcome = lived(3, merge, LIES[lie])
    assert percent_over(outcome, honest) < BOUND_PERCENT
    assert outcome.figures["quarantined_honest"] == 0


@pytest.mark.parametrize("name", BROKEN)
def test_one_broken_learner_of_three_costs_at_most_the_bound(honest_for_longer: Outcome, name: str) -> None:
    outcome = lived(3, "rda", BROKEN[name], step_count=LONGER)
    assert percent_over(outcome, honest_for_longer) < BOUND_PERCENT
    assert outcome.figures["quarantined_honest"] == 0
