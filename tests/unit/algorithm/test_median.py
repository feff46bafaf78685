"""The geometric median of directions: what it does to those who disagree, and that it is merged and replayed."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from skerry.algorithm.median import add_products, median_shares
from skerry.wire.policy import MergeRule, OuterOptimizer, OuterSchedule, Policy
from skerry_syncer.merge.inner_products import inner_products
from skerry_syncer.store.versions.replay import Replayer
from tests.unit.algorithm.merge_driver import FLOAT32, FRAGMENT, INT4, Driver, layout_of

EQUAL = Policy(
    merge=MergeRule.MEDIAN,
    outer=OuterOptimizer(learning_rate=1.0, momentum=0.0, schedule=OuterSchedule.CONSTANT),
    delta_encoding=FLOAT32,
    update_encoding=FLOAT32,
)


def shares_of(*rows: list[float], weights: list[float] | None = None) -> NDArray[np.float64]:
    """Returns the shares of deltas of one tensor."""
    values = np.array(rows, np.float32)
    products = np.zeros((1, len(rows), len(rows)))
    add_products(products, values, 0)
    given = np.ones(len(rows)) if weights is None else np.array(weights)
    return median_shares(given / given.sum(), products, np.array([values.shape[1]], np.float64))[:, 0]


def test_equal_directions_share_equally_whatever_their_length() -> None:
    np.testing.assert_allclose(shares_of([1, 0], [5, 0], [0.1, 0]), [1 / 3] * 3, rtol=1e-6)


def test_who_undoes_what_the_others_do_has_no_share() -> None:
    shares = shares_of([1, 0.5, 0], [1, 0, 0.5], [-1, -0.2, -0.2])
    assert shares[2] == 0
    np.testing.assert_allclose(shares[:2], 1 / 2)


def test_of_two_that_disagree_neither_is_left_out() -> None:
    np.testing.assert_allclose(shares_of([1, 0], [-1, 0.1]), [1 / 2] * 2, rtol=1e-6)


def test_nobody_weighs_more_than_the_median_one() -> None:
    assert shares_of([1, 0, 0], [0, 1, 0], [0, 0, 1], weights=[1, 1, 1e9])[2] == pytest.approx(1 / 3)


def test_the_shares_lead_to_the_point_of_least_distance() -> None:
    """No step from the median to any side makes the sum of distances less."""
    generator = np.random.default_rng(0)
    rows = generator.standard_normal((7, 5)) + 2
    rows[6] = [3, -1, 0, 5, 1]
    units = rows / np.linalg.norm(rows, axis=1, keepdims=True)

    def distance(point: NDArray[np.float64]) -> float:
        return float(np.linalg.norm(units - point, axis=1).sum())

    median = shares_of(*rows.tolist()) @ units
    around = [distance(median + 0.05 * side) for side in (*np.eye(5), *-np.eye(5))]
    assert distance(median) < min(around)
    assert distance(median) < distance(units.mean(axis=0))


async def test_a_median_is_merged_and_replayed_bit_for_bit() -> None:
    driver = await Driver.start(layout_of((2, 1), (2,)), EQUAL)
    honest = [await driver.push(0, [2, 1, 0, 3]), await driver.push(1, [2, 0, 1, 3])]
    liar = await driver.push(2, [-2, -1, 0, -3])
    await driver.round([*honest, liar])
    assert np.all(driver.state.weights <= 0)
    assert driver.state.weights[0] < -1
    rebuilt = await Replayer(driver.log, FRAGMENT, driver.workers).rebuild(1, driver.scratch)
    np.testing.assert_array_equal(rebuilt.weights, driver.state.weights)


@pytest.mark.parametrize("is_kept", [False, True])
async def test_inner_products_do_not_depend_on_how_deltas_are_cut(is_kept: bool) -> None:
    """Deltas in other parts and codecs, and larger than a tile, are read side by side."""
    layout = layout_of((300, 200), (7,), (20, 500))
    driver = await Driver.start(layout, EQUAL)
    values = np.random.default_rng(1).standard_normal((3, layout.numel)).astype(np.float32)
    values[1] = np.round(values[1])
    deltas = [
        await driver.push(0, values[0], cuts=(60_000,), is_kept=is_kept),
        await driver.push(1, values[1], cuts=(30_000, 60_007), is_kept=is_kept),
        await driver.push(2, values[2], encoding=INT4, is_kept=is_kept),
    ]
    found = await inner_products(driver.log, FRAGMENT, deltas, workers=driver.workers)
    for tensor, start, stop in layout.ranges(0, layout.numel):
        expected = values[:2, start:stop].astype(np.float64) @ values[:2, start:stop].T.astype(np.float64)
        np.testing.assert_allclose(found[tensor, :2, :2], expected, rtol=1e-6, atol=1e-6)
        assert found[tensor, 2, 2] == pytest.approx(deltas[2].squared_norms[tensor], rel=1e-6)
