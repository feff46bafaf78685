"""Weights, staleness, length, doubt and participation of a round, with numbers checked by hand."""

from __future__ import annotations

import math

import pytest

from skerry.algorithm.rounds import (
    Contribution,
    believed_bounds,
    delta_weight,
    outage_length,
    participation,
    relative_speed,
    round_length,
    rounds_behind,
    staleness_damping,
)

H = 24


@pytest.mark.parametrize(("tokens", "steps", "weight"), [(2400, 24, 2400), (9600, 96, 4800), (100, 0, 0)])
def test_tokens_of_more_than_twice_h_steps_do_not_count(tokens: int, steps: int, weight: float) -> None:
    assert delta_weight(tokens, steps, inner_step_count=H) == weight


def test_a_learner_of_more_than_100_times_the_others_median_counts_as_that_median() -> None:
    assert believed_bounds({"a": 1e4, "b": 100, "c": 1, "d": 300}) == dict.fromkeys("abcd", math.inf)
    # the median of (100, 1, 300) is 100
    bounds = believed_bounds({"a": 10_001, "b": 100, "c": 1, "d": 300})
    assert bounds == {**dict.fromkeys("bcd", math.inf), "a": 100}


def test_the_median_of_two_others_is_their_mean() -> None:
    assert believed_bounds({"a": 1.0, "b": 2.0, "c": 151.0}) == {"a": math.inf, "b": math.inf, "c": 1.5}


def test_of_two_learners_neither_is_doubted() -> None:
    assert believed_bounds({"a": 1.0, "b": 1e9}) == {"a": math.inf, "b": math.inf}


@pytest.mark.parametrize(("steps", "rounds"), [(0, 0), (11, 0), (12, 1), (35, 1), (36, 2)])
def test_staleness_counts_rounds_to_the_nearest(steps: float, rounds: int) -> None:
    assert rounds_behind(steps, inner_step_count=H) == rounds


@pytest.mark.parametrize(("rounds", "damping"), [(0, 1.0), (3, 0.5), (8, 1 / 3)])
def test_staleness_damps_by_a_square_root(rounds: int, damping: float) -> None:
    assert staleness_damping(rounds) == pytest.approx(damping, rel=1e-15)


def test_a_round_is_as_long_as_half_of_its_weight_came_in() -> None:
    # 24 steps bring 2 of 6, 16 steps another 2: more than half in 16 steps or more
    assert round_length([24, 16, 4], [2, 2, 2], inner_step_count=H) == 16
    assert round_length([24, 16, 4], [2, 1, 6], inner_step_count=H) == 4
    assert round_length([96, 96], [1, 1], inner_step_count=H) == H
    assert round_length([8, 20], [0, 0], inner_step_count=H) == 20, "without weights deltas count alike"
    assert round_length([], [], inner_step_count=H) == 0


def test_a_learner_that_takes_half_of_the_runs_steps_has_half_its_weight() -> None:
    assert (relative_speed(8, 16.0), relative_speed(40, 16.0), relative_speed(8, 0.0)) == (0.5, 1.0, 1.0)


def test_participation_is_the_share_of_the_working_learners_weight() -> None:
    deltas = [Contribution(100, 1.0), Contribution(100, 0.5)]
    assert participation(deltas, []) == 0.75  # (100 + 50) / 200
    assert participation(deltas, [50, 50]) == 0.5  # (100 + 50) / 300
    assert participation([Contribution(0, 1.0)], []) == 1


def outage(*deltas: tuple[int, float, float], working: float = 4.0) -> float | None:
    """`deltas` have steps, weights and missed steps."""
    steps, weights, missed = zip(*deltas, strict=True)
    return outage_length(steps, weights, missed, working_weight=working, inner_step_count=H)


def test_after_an_outage_of_all_a_round_is_as_long_as_what_three_quarters_of_the_weight_took() -> None:
    assert outage((240, 1, 0), (250, 1, 0), (260, 1, 0), (270, 1, 0)) == 250
    assert outage((5, 1, 0), (250, 1, 0), (260, 1, 0), (270, 1, 0)) == 250
    assert outage((5, 1, 0), (5, 1, 0), (260, 1, 0), (270, 1, 0)) is None
    assert outage((H, 3, 0), (250, 1, 0)) is None


def test_learners_that_did_not_keep_up_are_no_evidence_of_an_outage() -> None:
    assert outage((240, 2, H / 2), (250, 2, 0)) is None
    assert outage((900, 1, H / 2), (250, 3, H / 2 - 1)) == 250
    assert outage((240, 2, 0)) is None, "the others work, and brought nothing"
