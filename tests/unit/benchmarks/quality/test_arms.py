"""Arms of the quality benchmark: how many tokens one plans, checked by hand."""

from __future__ import annotations

from benchmarks.quality.arms import Island, islands


def test_an_arm_plans_the_tokens_that_its_islands_train() -> None:
    slow = Island(speed=0.5, batch_size=4, start_within=20.0, absent=((90.0, 120.0),), deaths=1)
    arm = islands(2, 100, 1e-2, islands=(Island(), slow))
    assert arm.planned_tokens == 100 * 8 * 64 + 100 * 4 * 64
    # By the clock the slow one misses 10 of 100 time units at the start, 10 at the end and 10 by its death.
    by_clock = islands(2, 100, 1e-2, islands=(Island(), slow), is_wall_clock=True)
    assert by_clock.planned_tokens == 100 * 8 * 64 + 35 * 4 * 64
