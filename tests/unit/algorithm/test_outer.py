"""Momentum, rate and scalars of the outer step, with numbers checked by hand."""

from __future__ import annotations

import pytest

from skerry.algorithm.outer import OuterStep, learning_rate_at, momentum_at, outer_step, settling_steps
from skerry.wire.policy import MergeRule, OuterName, OuterOptimizer, OuterSchedule

OUTER = OuterOptimizer(learning_rate=0.8, momentum=0.8)
CONSTANT = OuterOptimizer(learning_rate=0.7, momentum=0.9, schedule=OuterSchedule.CONSTANT)


def momentum(steps: float, *, planned: int = 0, outer: OuterOptimizer = OUTER) -> float:
    return momentum_at(outer, momentum_steps=steps, run_steps=steps, planned_step_count=planned, inner_step_count=24)


@pytest.mark.parametrize(("steps", "expected"), [(0, 1 / 4), (24, 2 / 5), (48, 1 / 2), (264, 0.8), (10_000, 0.8)])
def test_momentum_warms_up_by_the_steps_behind_it(steps: float, expected: float) -> None:
    assert momentum(steps) == pytest.approx(expected, rel=1e-15)


def test_momentum_falls_to_nothing_at_the_planned_end() -> None:
    # over the last 8 * 24 = 192 steps of 3000
    assert settling_steps(3000, 24) == 192
    assert [momentum(steps, planned=3000) for steps in (2808, 2904, 3000, 4000)] == pytest.approx([0.8, 0.4, 0, 0])


def test_a_short_run_settles_over_its_last_eighth() -> None:
    assert settling_steps(800, 24) == 100


def test_a_constant_schedule_is_as_it_is_stated() -> None:
    assert momentum(3000, planned=3000, outer=CONSTANT) == 0.9
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
