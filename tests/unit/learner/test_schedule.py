"""The learning rate over a run."""

from __future__ import annotations

from functools import partial

import pytest

from skerry_learner.schedule import learning_rate, run_position


def test_the_rate_rises_to_its_peak_and_falls_to_its_floor() -> None:
    rates = [learning_rate(position, peak=1.0, warmup_steps=10, horizon_steps=110) for position in range(120)]
    assert rates[:11] == sorted(rates[:11])
    assert max(rates) == rates[10] == 1.0
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[60] == pytest.approx(0.55)
    assert rates[110] == rates[119] == pytest.approx(0.1)


def test_a_run_shorter_than_its_warm_up_never_divides_by_zero() -> None:
    rate = partial(learning_rate, peak=1.0, warmup_steps=10, horizon_steps=5)
    assert [rate(4), rate(10), rate(11)] == [pytest.approx(5 / 11), 1.0, pytest.approx(0.1)]


@pytest.mark.parametrize(
    ("step", "progress", "horizon", "planned", "position"),
    [
        (3, 40.0, 100, 100, 40.0),  # a latecomer goes by the run
        (60, 40.0, 100, 100, 60.0),  # the fastest learner goes by its own steps
        (10, 300.0, 200, 600, 100.0),  # three times slower than planned: as far as the run, in its own steps
        (150, 300.0, 200, 600, 150.0),
        (10, 300.0, 200, 0, 300.0),  # no plan: the run's steps count
    ],
)
def test_the_position_is_the_larger_of_the_learners_and_the_runs(
    step: int, progress: float, horizon: int, planned: int, position: float
) -> None:
    assert run_position(step, progress, horizon_steps=horizon, planned_step_count=planned) == position
