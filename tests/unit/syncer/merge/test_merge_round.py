"""Golden histories of two learners and four elements, small enough to check by hand, and what failures leave."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
from msgspec import structs

from skerry.wire.digests import tree_digest
from skerry.wire.policy import MergeRule, OuterName, OuterOptimizer, OuterSchedule, Policy
from skerry_syncer.store.log.entries import PolicyItem
from skerry_syncer.store.versions.replay import UnreadableDeltaError, float32s_from_hex
from tests.support.merge_driver import FLOAT32, FRAGMENT, INT4, Driver, layout_of

PLAIN_SGD = OuterOptimizer(learning_rate=1.0, momentum=0.0, schedule=OuterSchedule.CONSTANT)


def policy(rule: MergeRule, outer: OuterOptimizer = PLAIN_SGD) -> Policy:
    return Policy(merge=rule, outer=outer, delta_encoding=FLOAT32, update_encoding=FLOAT32, quarantine_ratio=0.0)


async def test_a_mean_is_weighted_by_its_members_weights() -> None:
    driver = await Driver.start(layout_of((4,)), policy(MergeRule.MEAN))
    deltas = [await driver.push(0, [4, 0, 0, -8]), await driver.push(1, [0, 4, 0, -8])]
    await driver.round(deltas, weights=[1, 3])
    # 1/4 of one and 3/4 of the other; theta = 0 - 1 * that
    assert driver.state.weights.tolist() == [-1, -3, 0, 8]
    assert driver.state.version == 1


async def test_rda_works_on_each_tensor_by_itself() -> None:
    driver = await Driver.start(layout_of((2, 1), (2,)), policy(MergeRule.RDA))
    deltas = [await driver.push(0, [2, 0, 0, 3]), await driver.push(1, [6, 0, 0, 5])]
    await driver.round(deltas)
    np.testing.assert_allclose(driver.state.weights, [-4, 0, 0, -4], rtol=3e-7)


@pytest.mark.parametrize("name", OuterName)
@pytest.mark.parametrize("participation", [0.25, 0.5, 0.75])
async def test_momentum_goes_on_as_fast_when_rounds_come_in_parts(name: OuterName, participation: float) -> None:
    driver = await Driver.start(layout_of((1,)), policy(MergeRule.MEAN, OuterOptimizer(name=name)))

    async def merge(share: float) -> float:
        before = float(driver.state.weights[0])
        await driver.round([await driver.push(0, [1])], participation=share)
        return before - float(driver.state.weights[0])

    for _ in range(40):
        whole = await merge(1.0)
    assert whole == pytest.approx(0.8 / (1 - 0.8), rel=1e-3)
    moved = [await merge(participation) for _ in range(round(3 / participation))]
    assert sum(moved) == pytest.approx(3 * whole, rel=0.02)


async def test_a_plan_made_or_changed_while_the_run_goes_on_counts_from_the_next_close() -> None:
    outer = OuterOptimizer(name=OuterName.NESTEROV, learning_rate=1.0, momentum=0.5)
    endless = policy(MergeRule.MEAN, outer)
    driver = await Driver.start(layout_of((1,)), endless)
    momenta = []
    for planned_rounds in (0, 0, 0, 0, 4, 4, 100, 100):
        plan = replace(endless, planned_token_count=1000 * planned_rounds)
        await driver.append(PolicyItem(f"{driver.delta_count:032x}", plan))
        item = await driver.round([await driver.push(0, [1])])
        momenta += list(float32s_from_hex([item.scalars.momentum]))
    assert momenta[3:] == [0.5, 0.0, 0.0, 0.5, 0.5]


async def test_momentum_settles_at_the_planned_tokens_of_unequal_learners_and_comes_back_by_a_roll_back() -> None:
    outer = OuterOptimizer(name=OuterName.NESTEROV, learning_rate=1.0, momentum=0.5)
    driver = await Driver.start(layout_of((1,)), replace(policy(MergeRule.MEAN, outer), planned_token_count=40_000))

    async def momentum() -> float:
        deltas = [await driver.push(0, [1], tokens=3000), await driver.push(1, [1], steps=8, tokens=1000)]
        (value,) = float32s_from_hex([(await driver.round(deltas, weights=[3000, 1000])).scalars.momentum])
        return float(value)

    # 1/4 and 2/5 warm up; the last eighth of the tokens begins after 35,000: 0.5 * 4/5 after 36,000.
    momenta = [await momentum() for _ in range(12)]
    assert momenta == pytest.approx([0.25, 0.4, *[0.5] * 7, 0.4, 0, 0])
    await driver.roll_back(8)
    assert driver.log.state.token_count == 32_000
    assert [await momentum() for _ in range(3)] == pytest.approx([0.25, 0.32, 0])


async def test_momentum_ramps_over_the_first_three_rounds() -> None:
    outer = OuterOptimizer(name=OuterName.NESTEROV, learning_rate=1.0, momentum=0.5, schedule=OuterSchedule.WARM_UP)
    driver = await Driver.start(layout_of((4,)), policy(MergeRule.MEAN, outer))
    # mu = 1/4, 2/5, 1/2: round by round, for d = 1
    #   buf 1,                step 1 + 0.25 * 1    = 1.25
    #   buf 0.4 + 1 = 1.4,    step 1 + 0.4 * 1.4   = 1.56
    #   buf 0.7 + 1 = 1.7,    step 1 + 0.5 * 1.7   = 1.85
    expected = np.array([1, 0, -2, 0.5])
    total = 0.0
    for step, momentum in ((1.25, 1.0), (1.56, 1.4), (1.85, 1.7)):
        deltas = [await driver.push(0, [2, 0, -4, 0]), await driver.push(1, [0, 0, 0, 1])]
        await driver.round(deltas)
        total += step
        np.testing.assert_allclose(driver.state.weights, -total * expected, rtol=1e-6)
        np.testing.assert_allclose(driver.state.momentum, momentum * expected, rtol=1e-6)


async def test_a_delta_of_more_steps_than_the_median_token_has_is_shortened_to_them() -> None:
    driver = await Driver.start(layout_of((3,)), policy(MergeRule.MEAN))
    deltas = [await driver.push(index, np.eye(3)[index] * 8, steps=8) for index in (0, 1)]
    deltas.append(await driver.push(2, [0, 0, 24], steps=24))
    await driver.round(deltas, weights=[64, 64, 48], length=8.0)
    np.testing.assert_allclose(driver.state.weights, [-8 * 64 / 176, -8 * 64 / 176, -8 * 48 / 176], rtol=1e-6)
    assert driver.log.state.fragments[FRAGMENT].newest.step_count == 8


@pytest.mark.parametrize("name", OuterName)
async def test_an_outage_ends_where_its_way_and_one_rounds_momentum_lead(name: OuterName) -> None:
    """What is published ahead is paid back: one long round, then nothing new, and no optimizer overshoots."""
    outer = OuterOptimizer(name=name, learning_rate=1.0, momentum=0.5, schedule=OuterSchedule.CONSTANT)
    driver = await Driver.start(layout_of((1,)), policy(MergeRule.MEAN, outer))
    await driver.round([await driver.push(index, [240], steps=240) for index in range(2)], length=240.0)
    for _ in range(30):
        await driver.round([await driver.push(index, [0]) for index in range(2)])
    # the way itself, and 24 (1/2 + 1/4 + ...) of momentum
    assert -float(driver.state.weights[0]) == pytest.approx(240 + 24, rel=1e-6)


async def test_a_participation_of_a_quarter_scales_the_step_to_a_quarter() -> None:
    driver = await Driver.start(layout_of((4,)), policy(MergeRule.MEAN))
    await driver.round([await driver.push(0, [4, 8, 0, -4])], participation=0.25)
    assert driver.state.weights.tolist() == [-1, -2, 0, 1]


async def test_tiny_and_huge_norms_stay_finite() -> None:
    driver = await Driver.start(layout_of((2, 2), (2, 2)), policy(MergeRule.RDA))
    deltas = [
        await driver.push(0, [1e-38, 0, 0, 0, 1e30, 0, 0, 0]),
        await driver.push(1, [1e-45, 0, 0, 0, 1e-30, 0, 0, 0]),
    ]
    await driver.round(deltas)
    assert np.isfinite(driver.state.weights).all()


async def test_what_an_update_drops_stays_as_residual_and_enters_the_next() -> None:
    quantised = Policy(merge=MergeRule.MEAN, outer=PLAIN_SGD, update_encoding=INT4)
    driver = await Driver.start(layout_of((1, 4)), quantised)
    first = np.array([7, 0.4, 1.2, -3.3], np.float32)
    await driver.round([await driver.push(0, first)])
    # int4 of absmax 7: whole numbers
    assert driver.state.weights.tolist() == [-7, 0, -1, 3]
    np.testing.assert_allclose(driver.state.residual, [0, 0.4, 0.2, -0.3], atol=3e-7)
    await driver.round([await driver.push(1, [7, 0.4, 0.4, 0])])
    assert driver.state.weights.tolist() == [-14, -1, -2, 3]


async def test_a_merge_takes_the_state_to_the_version_that_its_commit_names() -> None:
    driver = await Driver.start(layout_of((3, 5)), Policy(update_encoding=INT4))
    rng = np.random.default_rng(1)
    await driver.round([await driver.push(0, rng.normal(size=15))])
    result = await driver.merge(await driver.close([await driver.push(1, rng.normal(size=15))]))
    assert driver.log.state.fragments[FRAGMENT].version == 1
    assert driver.state.version == 2
    assert tree_digest(driver.state.weights).hex() == result.commit.digest
    item = await driver.commit(result)
    assert item == structs.replace(result.commit, update=item.update)


async def test_a_merge_is_only_the_logs_where_the_commit_names_its_own_scalars() -> None:
    driver = await Driver.start(layout_of((4,)), policy(MergeRule.RDA))
    mine = await driver.merge(await driver.close([await driver.push(0, [1, 2, 3, 4])]))
    item = await mine.stored()
    assert item.update
    assert mine.is_same_version_as(item)
    scalars = structs.replace(item.scalars, rate="3f000000")
    assert not mine.is_same_version_as(structs.replace(item, scalars=scalars))


async def test_a_change_of_policy_does_not_reach_a_set_that_is_closed() -> None:
    driver = await Driver.start(layout_of((4,)), policy(MergeRule.RDA))
    closing = await driver.close([await driver.push(0, [1, 2, 3, 4])])
    unmerged = copy.deepcopy(driver.state)
    before = await driver.merge(closing)
    await driver.append(PolicyItem("e" * 32, policy(MergeRule.MEAN)))
    driver.state = unmerged
    assert before.is_same_version_as((await driver.merge(closing)).commit)


@pytest.mark.parametrize("is_lost", [True, False])
async def test_a_delta_with_a_lost_part_or_a_flipped_bit_is_named_and_the_state_is_untouched(is_lost: bool) -> None:
    driver = await Driver.start(layout_of((8, 4)), policy(MergeRule.MEAN))
    good = await driver.push(0, np.ones(32))
    bad = await driver.push(1, np.ones(32), cuts=[16])
    if is_lost:
        await driver.objects.delete([f"{driver.log.prefix}/{bad.parts[1].name}"])
    else:
        await driver.damage(bad.parts[1].name)
    closing = await driver.close([good, bad])
    with pytest.raises(UnreadableDeltaError) as raised:
        await driver.merge(closing)
    assert raised.value.delta == bad.delta
    assert not driver.state.weights.any()
    assert driver.state.version == 0
