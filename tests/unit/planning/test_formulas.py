"""The formulas against the published tables: Scaling Laws for DiLoCo, table 6, and Decoupled DiLoCo."""

from __future__ import annotations

import pytest

from skerry.planning.formulas import (
    GRID_BITS_PER_S,
    UTILISATIONS,
    fragment_bits_per_s,
    mean_bits_per_s,
    synchronous_bits_per_s,
    synchronous_utilisation,
)

# By H, 1 for data-parallel: Gbit/s for each of UTILISATIONS, of 10 billion parameters with steps of 0.8 s.
TABLE_6 = {
    1: (104.8, 184.2, 222.3, 222.3, 390.7),
    10: (16.0, 49.4, 86.8, 152.6, 222.3),
    50: (3.0, 11.0, 23.3, 41.0, 126.5),
    100: (1.4, 6.2, 13.3, 23.3, 86.8),
    300: (0.5, 2.0, 4.3, 9.1, 41.0),
}


def grid_point(bits_per_s: float) -> int:
    return min(range(len(GRID_BITS_PER_S)), key=lambda point: abs(GRID_BITS_PER_S[point] / bits_per_s - 1))


@pytest.mark.parametrize("inner_step_count", TABLE_6)
def test_every_published_bandwidth_is_met_within_one_point_of_its_grid(inner_step_count: int) -> None:
    for utilisation, gigabits in zip(UTILISATIONS, TABLE_6[inner_step_count], strict=True):
        found = synchronous_bits_per_s(10e9, 0.8, utilisation, inner_step_count)
        assert found is not None
        assert abs(grid_point(found) - grid_point(gigabits * 1e9)) <= 1, f"{utilisation}: {found / 1e9} Gbit/s"


def test_the_bandwidth_for_a_utilisation_reaches_it_and_the_point_below_does_not() -> None:
    found = synchronous_bits_per_s(1e9, 1.0, 0.8, 24)
    assert found is not None
    below = GRID_BITS_PER_S[GRID_BITS_PER_S.index(found) - 1]
    assert synchronous_utilisation(1e9, 1.0, found, 24) >= 0.8 > synchronous_utilisation(1e9, 1.0, below, 24)


def test_a_utilisation_that_no_bandwidth_reaches_is_none() -> None:
    assert synchronous_bits_per_s(1e15, 1.0, 0.99) is None


def test_decoupled_diloco_needs_what_it_publishes() -> None:
    assert fragment_bits_per_s(16, 5e9, 1.0, 24) == pytest.approx(1.7e9, rel=0.02)  # data-parallel: 104
    assert fragment_bits_per_s(4, 10e9, 1.0, 24) == pytest.approx(0.84e9, rel=0.01)  # 198
    assert mean_bits_per_s(16, 5e9, 1.0, 24) == 2 * fragment_bits_per_s(16, 5e9, 1.0, 24)
