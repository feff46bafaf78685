"""Runs in virtual time: what stops learners, and what it costs."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from skerry.wire.policy import Policy
from skerry_syncer.simulation.history import History, cost
from skerry_syncer.simulation.scenario import STORE, SYNCER, YEAR_S, Outage, Region, Scenario
from skerry_syncer.simulation.world import World

FOUR = tuple(Region(name, jitter=0.02) for name in ("us", "eu", "ap", "sa"))
HOUR_S = 3600.0


def simulated(
    *outages: Outage, regions: tuple[Region, ...] = FOUR, duration_s: float = HOUR_S, seed: int = 0
) -> History:
    return World(Scenario(regions, duration_s, fragment_count=2, outages=outages, seed=seed)).run()


def test_the_same_seed_gives_the_same_history_and_another_seed_another() -> None:
    failing = (Region("us", count=2, chip_count=150e3, jitter=0.1), Region("eu", 1.2, chip_count=150e3))
    outage = Outage("eu", 600, 300)
    first, again, other = (simulated(outage, regions=failing, seed=seed) for seed in (1, 1, 2))
    assert (first.rounds, first.learners) == (again.rounds, again.learners)
    assert first.rounds != other.rounds


def test_learners_alike_that_nothing_stops_have_every_step_merged() -> None:
    seen = simulated(regions=(Region("us", count=4),)).summary()
    assert seen["training"] == seen["goodput"] == seen["participation"] == pytest.approx(1.0)
    assert seen["worst_staleness"] == 0


def test_a_failure_stops_its_learner_and_failures_meanwhile_cost_nothing() -> None:
    mtbf_s, loss_s = 100.0, 50.0
    failing = Region("us", count=2, chip_count=YEAR_S / mtbf_s, failure_loss_s=loss_s)
    shares = simulated(regions=(failing,), duration_s=6 * HOUR_S).shares()
    assert shares["training"] == pytest.approx(mtbf_s / (mtbf_s + loss_s), abs=0.04)


def test_a_slice_that_is_away_takes_its_share_of_the_chips_and_stops_nobody() -> None:
    chips = YEAR_S / 20.0  # one fails every 20 seconds
    whole = Region("us", count=2, chip_count=chips, failure_loss_s=0.001)
    sliced = replace(whole, slice_chip_count=chips / 40, repair_s=80.0)
    shares, without = (simulated(regions=(region,), duration_s=4 * HOUR_S).shares() for region in (sliced, whole))
    assert shares["merged_step_count"] == without["merged_step_count"]
    for name in ("training", "goodput"):
        assert shares[name] / without[name] == pytest.approx(1 - 80 / 20 / 40, abs=0.01)


def test_a_region_that_goes_away_costs_its_own_steps_and_the_others_none() -> None:
    lost = cost(simulated(Outage("us", 1000, 600), Outage("eu", 1000, 600)), simulated())
    assert lost["merged_step_count"] == pytest.approx(2 * 600, rel=0.05)
    assert abs(lost["others_merged_step_count"]) < 0.02 * 2 * 600


def test_a_region_that_is_cut_off_trains_on_and_is_merged_again_when_it_is_back() -> None:
    cut, calm = simulated(Outage("us", 1000, 600, is_cut=True)), simulated()
    assert cut.shares("us")["training"] == pytest.approx(1.0, abs=0.01)
    assert not [each for each in cut.rounds if 1030 < each.merged_s < 1600 and "us" in each.step_counts]
    late = [each for each in cut.rounds if each.merged_s > 1700]
    assert sum("us" in each.step_counts for each in late) > 0.95 * len(late)
    lost = cost(cut, calm)
    assert lost["merged_step_count"] == pytest.approx(600, rel=0.1), "a delta counts up to its round's length"
    assert abs(lost["others_merged_step_count"]) < 0.02 * 600


@pytest.mark.parametrize(("place", "most"), [(SYNCER, 0.05), (STORE, 0.2)])
def test_the_steps_of_an_outage_of_syncers_or_store_are_merged_after_it(place: str, most: float) -> None:
    lost = cost(simulated(Outage(place, 1000, 600)), simulated())
    assert lost["merged_step_count"] < most * len(FOUR) * 600


def test_learners_that_join_and_leave_count_for_as_long_as_they_are_there() -> None:
    regions = (Region("us"), Region("late", join_s=1200), Region("early", leave_s=1200))
    seen = simulated(regions=regions)
    assert [each.allocated_s for each in seen.learners.values()] == [3600, 2400, 1200]
    for name in ("late", "early"):
        assert seen.shares(name)["goodput"] > 0.97
    assert seen.rounds[-1].participation == pytest.approx(1.0), "nobody waits for a learner that left"


def test_a_quorum_of_all_merges_what_the_slowest_brings() -> None:
    regions = (Region("fast", count=2), Region("slow", 1.5, count=2))
    run = World(Scenario(regions, HOUR_S, Policy(quorum_count=4), fragment_count=1)).run()
    assert {len(each.step_counts) for each in run.rounds} == {4}


def test_a_narrow_link_makes_versions_late_and_stops_no_training() -> None:
    wide, narrow = (
        World(Scenario((Region("us", count=2, bandwidth_bits_per_s=bits),), HOUR_S, parameters=1e9)).run().summary()
        for bits in (1e10, 1e8)
    )
    join_s = 32e9 / 1e8  # for the weights that it joins with
    assert narrow["training"] == pytest.approx(1 - join_s / HOUR_S, abs=0.001)
    assert narrow["version_count"] < 0.8 * wide["version_count"]


def test_the_fold_forgets_old_versions() -> None:
    world = World(Scenario((Region("us", step_s=0.1),), 1.5 * HOUR_S, fragment_count=1))
    assert len(world.run().rounds) > 2200
    assert len(world.state.deltas) < 1100


def test_it_is_a_thousand_times_faster_than_real_time() -> None:
    began_s = time.process_time()
    simulated(regions=(Region("us", count=8),))
    assert time.process_time() - began_s < HOUR_S / 1000
