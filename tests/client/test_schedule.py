"""When learners contribute, in inner steps."""

from __future__ import annotations

import pytest

from skerry.algorithm.schedule import RoundParts, RoundRhythm, first_contributions, is_due

H = 24


def rhythm_of(*opened_steps: int) -> RoundRhythm:
    """Returns the rhythm of a learner that had taken so many steps when each round opened."""
    rhythm = RoundRhythm()
    for step_count in opened_steps:
        rhythm.opened(step_count)
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


@pytest.mark.parametrize("opened", [(), (5,), (0, 24, 48), (0, 20, 40)])
def test_a_learner_that_opens_rounds_itself_is_never_early(opened: tuple[int, ...]) -> None:
    rhythm = rhythm_of(*opened)
    assert not any(rhythm.is_near(step, inner_step_count=H) for step in range(200))


def test_a_learner_left_alone_goes_back_to_h_steps() -> None:
    rhythm = rhythm_of(0, 4, 8)
    for number in range(1, 4):  # nobody else opens rounds any more: each opens H steps after an early delta
        rhythm.opened(8 + number * (H + 4))
    assert not rhythm.is_near(8 + 4 * (H + 4), inner_step_count=H)


def parts_of(*participations: float) -> RoundParts:
    """Returns what is known after versions 1, 2, ... were of these parts of rounds."""
    parts = RoundParts()
    for version, participation in enumerate(participations, start=1):
        parts.add(version, participation)
    return parts


def test_a_whole_round_leaves_nothing_to_come() -> None:
    assert parts_of(0.3, 1.0).missing(2, 2) == 0


def test_what_is_missing_of_a_round_comes_with_the_others_parts() -> None:
    parts = parts_of(0.25, 0.25, 0.25, 0.5, 0.25)
    assert [parts.missing(2, version) for version in (2, 3, 4, 5)] == [0.75, 0.5, 0.0, 0.0]


def test_what_rounding_leaves_of_a_round_is_nothing() -> None:
    assert parts_of(1 / 3, 0.33, 0.33).missing(1, 3) == 0


def test_versions_that_nobody_has_told_of_are_like_the_last() -> None:
    assert parts_of(0.25).missing(1, 3) == 0.25
    assert parts_of(0.25).missing(2, 3) == 0.5
    assert RoundParts().missing(1, 1) == 0  # rounds are whole as long as nothing else is known
    assert parts_of(0.25).missing(1, 10**9) == 0
    assert parts_of(0.25).missing(3, 2) == 0  # it is not in what was pulled


def test_a_way_that_nobody_tells_passes_for_a_whole_round() -> None:
    """A new stream tells of the newest version only, a roll-back of one that is no round at all."""
    parts = parts_of(0.25)
    parts.gap(1)
    assert parts.missing(1, 1) == 0.75  # it is known
    parts.gap(9)
    assert parts.missing(1, 9) == 0
    assert parts.missing(10, 10) == 0.75  # and says nothing of those to come


@pytest.mark.parametrize("participation", [0.0, -1.0, 1.5, float("nan"), float("inf")])
def test_a_part_that_is_none_passes_for_a_whole_round(participation: float) -> None:
    assert parts_of(participation).missing(1, 1) == 0


def test_what_was_only_damped_is_not_waited_for() -> None:
    assert parts_of(0.85).missing(1, 1) == 0


def test_parts_of_long_ago_are_forgotten() -> None:
    parts = parts_of(*[0.25] * 5000)
    assert len(parts._parts) == 1000
    assert parts.missing(4999, 5000) == 0.5
