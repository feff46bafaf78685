"""A broken learner of three costs the two sound ones at most 5 %."""

from __future__ import annotations

import pytest

from benchmarks.quality.arms import Outcome
from benchmarks.quality.broken import BELIEVED, BOUND_PERCENT, FAULTS, arm, percent_over
from benchmarks.quality.world import train_islands

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def sound() -> Outcome:
    return train_islands(arm(2), 0)


@pytest.mark.parametrize("name", [name for name in FAULTS if name != BELIEVED])
def test_one_broken_learner_of_three_costs_at_most_the_bound(sound: Outcome, name: str) -> None:
    outcome = train_islands(arm(3), 0, FAULTS[name]())
    assert percent_over(outcome, sound) < BOUND_PERCENT
    assert outcome.figures["quarantined_sound"] == 0
