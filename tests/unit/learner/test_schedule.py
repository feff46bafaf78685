"""The learning rate over a run."""

from __future__ import annotations

import pytest

from skerry_learner.schedule import LearningRateSchedule, run_position

_SCHEDULE = LearningRateSchedule(peak=1.0, warmup_steps=10, horizon_steps=110, floor_share=0.1)


def test_the_rate_rises_to_its_peak_and_falls_to_its_floor() -> None:
    rates = [_SCHEDULE.rate(position) for position in range(120)]
    assert rates[:11] == sorted(rates[:11])
    assert max(rates) == rates[10] == 1.0
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[60] == pytest.approx(0.55)
    assert rates[110] == rates[119] == pytest.approx(0.1)


def test_a_run_shorter_than_its_warm_up_never_divides_by_zero() -> None:
    schedule = LearningRateSchedule(peak=1.0, warmup_steps=10, horizon_steps=5)
    assert 0 < schedule.rate(4) < 1


def test_a_latecomer_goes_by_the_run_and_the_fastest_by_its_own_steps() -> None:
    assert run_position(3, 40.0, horizon_steps=100, planned_step_count=100) == 40.0
    assert run_position(60, 40.0, horizon_steps=100, planned_step_count=100) == 60.0


def test_a_learner_counts_the_runs_progress_in_steps_of_its_own_schedule() -> None:
    """One that is three times slower than the run's plan assumes is as far when the run is."""
    assert run_position(10, 300.0, horizon_steps=200, planned_step_count=600) == 100.0
    assert run_position(150, 300.0, horizon_steps=200, planned_step_count=600) == 150.0
    assert run_position(10, 300.0, horizon_steps=200, planned_step_count=0) == 300.0
