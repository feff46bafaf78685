"""Means and intervals of the quality benchmark, against numbers worked out by hand."""

from __future__ import annotations

import pytest

from benchmarks.quality.statistics import estimate, percent_over, share_of_gap


def test_an_interval_follows_student() -> None:
    found = estimate([1.0, 2.0, 3.0])
    # standard deviation 1, t of two degrees of freedom 4.303
    assert (found.mean, found.spread) == (2.0, 1.0)
    assert found.half_width == pytest.approx(4.303 / 3**0.5)


def test_a_bound_is_met_by_the_whole_interval_and_one_seed_can_not_say() -> None:
    found = estimate([1.0, 2.0, 3.0])
    assert found.is_at_most(found.interval[1])
    assert found.is_at_most(2.0) is False
    assert estimate([1.0]).is_at_most(5.0) is None


def test_percent_are_paired_by_seed() -> None:
    found = percent_over([1.01, 2.02], [1.0, 2.0])
    assert found.mean == pytest.approx(1.0)
    assert found.half_width == pytest.approx(0.0, abs=1e-9)


def test_the_share_of_the_gap_is_0_alone_and_1_together() -> None:
    assert share_of_gap([2.0], [2.0], [1.0]).mean == 0
    assert share_of_gap([1.0], [2.0], [1.0]).mean == 1
    assert share_of_gap([1.25], [2.0], [1.0]).mean == 0.75
