"""Momentum, rate and scalars of the outer step, with numbers checked by hand."""

from __future__ import annotations

import pytest

from skerry.algorithm.outer import OuterStep, learning_rate_at, momentum_at, outer_step, settling_share
from skerry.wire.policy import MergeRule, OuterName, OuterOptimizer, OuterSchedule

OUTER = OuterOptimizer(learning_rate=0.8, momentum=0.8)
CONSTANT = OuterOptimizer(learning_rate=0.7, momentum=0.9, schedule=OuterSchedule.CONSTANT)


def momentum(steps: float, *, share: float = 0.0, outer: OuterOptimizer = OUTER) -> float:
    return momentum_at(outer, momentum_steps=steps, run_steps=steps, share=share, inner_step_count=24)


@pytest.mark.parametrize(("steps", "expected"), [(0, 1 / 4), (24, 2 / 5), (48, 1 / 2), (264, 0.8), (10_000, 0.8)])
def test_momentum_warms_up_by_the_steps_behind_it(steps: float, expected: float) -> None:
    assert momentum(steps) == pytest.approx(expected, rel=1e-15)


def test_momentum_of_equal_learners_falls_over_the_last_eight_rounds() -> None:
    # over the last 8 * 24 = 192 steps of 3000, a share of 0.064
    assert settling_share(0.5, 1500, 24) == pytest.approx(0.064)
    momenta = [momentum(steps, share=steps / 3000) for steps in (2808, 2904, 3000, 4000)]
    assert momenta == pytest.approx([0.8, 0.4, 0, 0])


def test_momentum_falls_by_the_tokens_however_many_the_runs_clock_counts_a_step() -> None:
    # 1000 steps brought the first half of the tokens: 2000 steps in all, and the share of eight rounds is 0.096.
    assert settling_share(0.5, 1000, 24) == pytest.approx(0.096)
    # After 1600 steps a hundredth of the tokens is left: E = 8 * 0.99 * 24 / 1600 = 0.1188.
    assert momentum(1600, share=0.99) == pytest.approx(0.8 * 0.01 / 0.1188)
    assert momentum(1600, share=1.0) == 0
    # The clock is far ahead of the tokens: 0.2 of them are left, and E = 8 * 0.8 * 24 / 4000 = 0.0384.
    assert momentum(4000, share=0.8) == 0.8


def test_a_short_run_settles_over_its_last_eighth() -> None:
    assert settling_share(0.5, 400, 24) == 0.125
    assert settling_share(0.5, 0, 24) == 0.125


def test_a_constant_schedule_is_as_it_is_stated() -> None:
    assert momentum(3000, share=1.0, outer=CONSTANT) == 0.9
    assert learning_rate_at(CONSTANT, MergeRule.RDA, delta_count=4) == 0.7


@pytest.mark.parametrize(
    ("rule", "delta_count", "rate"), [(MergeRule.RDA, 2, 0.55), (MergeRule.RDA, 1, 0.8), (MergeRule.MEAN, 4, 0.8)]
)
def test_rda_of_several_deltas_has_a_lower_rate(rule: MergeRule, delta_count: int, rate: float) -> None:
    assert learning_rate_at(OUTER, rule, delta_count=delta_count) == pytest.approx(rate, rel=1e-15)


def test_a_whole_round_of_nesterov_is_the_textbooks() -> None:
    assert outer_step(OuterName.NESTEROV, 0.7, 0.9, round_count=1.0) == pytest.approx(OuterStep(0.7, 0.9, 0.9, 1.0))


def test_a_whole_round_leads_by_half_a_round_of_momentum() -> None:
    # l = mu = 1/2: (1 + l mu) d + mu (1 - l (1 - mu)) buf = 1.25 d + 0.375 buf
    step = outer_step(OuterName.LEADING_NESTEROV, 1.0, 0.5, round_count=1.0)
    assert step == pytest.approx(OuterStep(rate=1.25, momentum=0.375 / 1.25, decay=0.5, gain=1.0))


def test_half_a_round_moves_momentum_by_half_a_round() -> None:
    # decay = 0.25^0.5, gain = (1 - 0.5) / (1 - 0.25); T = t = 1/2: lr (d / 2 + buf / 8)
    step = outer_step(OuterName.NESTEROV, 1.0, 0.25, round_count=0.5)
    assert step == pytest.approx(OuterStep(rate=0.5, momentum=0.25, decay=0.5, gain=0.5 / 0.75))


def test_four_rounds_at_once_move_momentum_by_one() -> None:
    step = outer_step(OuterName.NESTEROV, 1.0, 0.5, round_count=4.0)
    assert step == pytest.approx(OuterStep(rate=4.0, momentum=0.125, decay=0.5, gain=1.0))
