"""Shares, coefficients and clipping of one round's deltas, with numbers checked by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from skerry.algorithm.merge import Pace, Round, largest_after, reference_norms, with_step
from skerry.wire.policy import MergeRule

H = 24


def round_of(
    rule: MergeRule,
    norms: Sequence[Sequence[float]],
    *,
    weights: Sequence[float] = (1, 1),
    steps: Sequence[int] = (H, H),
    reference: float = math.inf,
) -> Round:
    """Returns a round of length H whose deltas are all held against one reference norm a step."""
    return Round(
        rule,
        weights=np.array(weights, np.float64),
        norms=np.array(norms, np.float64),
        step_counts=np.array(steps, np.float64),
        length=H,
        inner_step_count=H,
        references=np.full((len(norms), len(norms[0])), reference),
    )


def test_members_without_any_weight_count_alike() -> None:
    np.testing.assert_array_equal(round_of(MergeRule.MEAN, [[1], [1]], weights=[0, 0]).shares(), [0.5, 0.5])


def test_the_mean_shortens_a_long_delta_to_the_rounds_length() -> None:
    merged = round_of(MergeRule.MEAN, [[1, 5], [1, 5]], weights=[1, 3], steps=[24, 48])
    np.testing.assert_array_equal(merged.coefficients(), np.array([[0.25, 0.25], [0.375, 0.375]], np.float32))
    np.testing.assert_array_equal(merged.tensor_scales(np.empty(0)), np.array([1, 1], np.float32))


def test_rda_sums_directions_and_gives_them_the_mean_norm() -> None:
    merged = round_of(MergeRule.RDA, [[2, 0], [4, 8]])
    np.testing.assert_array_equal(merged.coefficients(), np.array([[0.25, 0], [0.125, 0.0625]], np.float32))
    # orthogonal directions: |u| = 1 / sqrt 2 and 1 / 2; mean norms 3 and 4
    np.testing.assert_allclose(merged.tensor_scales(np.array([0.5**0.5, 0.5])), [3 * 2**0.5, 8], rtol=1e-7)


def test_directions_that_cancel_have_no_scale() -> None:
    merged = round_of(MergeRule.RDA, [[2], [2]])
    np.testing.assert_array_equal(merged.tensor_scales(np.array([2.0**-21])), np.array([0], np.float32))


def test_a_delta_four_times_as_long_as_its_peers_counts_for_a_quarter_of_its_share() -> None:
    # x = |v| / (L R) = 4, kappa = 2: a = (2 / 4)^2; one of twice the usual norm counts in full
    merged = round_of(MergeRule.MEAN, [[4.0], [2.0]], reference=1 / H)
    np.testing.assert_array_equal(merged.coefficients(), np.array([[0.125], [0.5]], np.float32))


def test_a_reference_is_the_upper_median_of_the_peers_and_at_least_a_tensors_part_of_the_whole() -> None:
    peers = np.array([[3.0, 0.0], [1.0, 0.0], [2.0, 4.0]])
    np.testing.assert_allclose(reference_norms(peers, np.array([1.0, 3.0])), [2, 2 * 0.75**0.5])
    assert np.isinf(reference_norms(np.empty((0, 2)), np.array([1.0, 3.0]))).all()


def test_a_learner_s_pace_keeps_the_largest_norms_of_a_long_training_in_few_pairs() -> None:
    pace: Pace = ()
    for step in range(24, 24 * 2000, 24):
        pace = with_step(pace, step, 2000 - step / 24)
        assert len(pace) <= 32
        assert pace[-1][0] == step
    for step in range(0, 24 * 1990, 24 * 10):
        norm = 2000 - step / 24
        assert norm - 1 <= largest_after(pace, step) <= norm + 2000 / 10
    assert largest_after(pace, 10**9) == pace[-1][1]


def test_deltas_of_a_learner_that_began_again_at_step_0_take_their_places_in_its_pace() -> None:
    pace = with_step(with_step(with_step((), 24, 1.0), 48, 0.1), 24, 3.0)
    assert (largest_after(pace, 0), largest_after(pace, 24)) == (3.0, 0.1)
