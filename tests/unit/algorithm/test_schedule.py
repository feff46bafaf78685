"""When learners contribute, in inner steps."""

from __future__ import annotations

import pytest

from skerry.algorithm.schedule import RoundRhythm, first_contributions, is_due

H = 24


def rhythm_of(*opened_steps: int, round_steps: float = H) -> RoundRhythm:
    """Returns the rhythm of a learner that had taken so many steps at each opening; rounds took `round_steps`."""
    rhythm = RoundRhythm()
    for number, step_count in enumerate(opened_steps):
        rhythm.opened(step_count, number * round_steps, inner_step_count=H)
    return rhythm


def test_first_contributions_are_spread_over_h() -> None:
    assert first_contributions(4, H) == (0, 6, 12, 18)


def test_a_contribution_is_due_h_steps_after_the_last() -> None:
    assert not is_due(33, contributed_step=10, inner_step_count=H)
    assert is_due(34, contributed_step=10, inner_step_count=H)


def test_a_slow_learner_contributes_a_step_before_the_next_round() -> None:
    rhythm = rhythm_of(0, 8, 16, 24)
    near = [step for step in range(24, 60) if rhythm.is_near(step, inner_step_count=H)]
    assert near == list(range(31, 41))  # from a step before the next round until it is long overdue


def test_a_learner_in_whose_step_several_rounds_open_contributes_with_every_other_step() -> None:
    """Its weights come up to date at one boundary and go out at the next; kept back, its work would pile up."""
    rhythm = rhythm_of(0, 0, 1, 1, 2, 2)
    assert rhythm.is_near(4, inner_step_count=H)
    assert not rhythm.is_near(5, inner_step_count=H)


@pytest.mark.parametrize("opened", [(), (5,), (0, 24, 48, 72), (0, 20, 40, 60)])
def test_a_learner_that_opens_rounds_itself_is_never_early(opened: tuple[int, ...]) -> None:
    rhythm = rhythm_of(*opened)
    assert not any(rhythm.is_near(step, inner_step_count=H) for step in range(200))


def test_a_learner_is_not_slow_because_rounds_are_short() -> None:
    """A peer's late deltas open rounds of their own; who answers them early must not make the next one early too."""
    rhythm = rhythm_of(0, 12, 24, 36, round_steps=H / 2)
    assert not any(rhythm.is_near(step, inner_step_count=H) for step in range(36, 80))


@pytest.mark.parametrize(
    ("openings", "interval"),
    [
        pytest.param([(0, 0), (8, 24), (16, 48), (31, 0)], 8, id="the run went back"),
        pytest.param([(24, 0), (48, 24), (72, 24), (96, 72), (120, 72), (144, 120)], H, id="void rounds"),
        # A learner of a third of the speed joined at the start: the run's progress lags until its fragments begin.
        pytest.param([(8, 0), (16, 3), (24, 27)], 8, id="first rounds"),
    ],
)
def test_rounds_in_which_the_run_does_not_go_on_as_usual_say_nothing_of_the_pace(
    openings: list[tuple[int, int]], interval: float
) -> None:
    rhythm = RoundRhythm()
    for step_count, run_step_count in openings:
        rhythm.opened(step_count, run_step_count, inner_step_count=H)
    assert rhythm.interval == interval


def test_first_deltas_of_more_than_h_steps_make_nobody_slow() -> None:
    """A run of four fragments begins with deltas of H to nearly 2 H steps: it goes on by 1.4 H in its second round."""
    for first, run_step_counts in ((24, (0, 33, 57, 81)), (42, (24, 48, 72, 96))):
        rhythm = RoundRhythm()
        for number, run_step_count in enumerate(run_step_counts):
            step_count = first + number * H
            rhythm.opened(step_count, run_step_count, inner_step_count=H)
            assert not any(rhythm.is_near(step, inner_step_count=H) for step in range(step_count, step_count + 2 * H))


def test_a_learner_left_alone_goes_back_to_h_steps() -> None:
    rhythm = rhythm_of(0, 4, 8, 12)
    for number in range(1, 4):  # nobody else opens rounds any more: each opens H steps after an early delta
        rhythm.opened(12 + number * (H + 4), (3 + number) * H, inner_step_count=H)
    assert not rhythm.is_near(12 + 4 * (H + 4), inner_step_count=H)
