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
    ("step", "progress", "position"),
    [
        (3, 0.5, 100.0),  # a latecomer goes by the run
        (150, 0.5, 150.0),  # the fastest learner goes by its own steps
        (10, 1.0, 200.0),  # the run took fewer steps of this learner than planned: the schedule is at its end
        (250, 1.0, 250.0),
        (10, None, 10.0),  # no plan
    ],
)
def test_the_position_is_the_larger_of_the_learners_and_the_runs(
    step: int, progress: float | None, position: float
) -> None:
    assert run_position(step, progress, horizon_steps=200) == position
