"""A plan by hand, with figures that are easy to multiply."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from skerry.planning.figures import Figures
from skerry.planning.plan import HOURS, PART_BYTES, Plan, Prices, Setting, Site, plan
from skerry.wire.codecs import Codec
from skerry.wire.policy import Policy
from skerry_syncer.run.push import SUGGESTED_PART_BYTES

N = 1e9
FIGURES = Figures(
    bits=4.0,
    learner_cpu_s=1e-8,
    syncer_cpu_s=1e-8,
    learner_memory=2.5,
    step_s=1e-9,
    put_count=5.0,
    get_count=20.0,
    log_bytes=2000.0,
    syncer_bytes=((1e8, 6e8), (1e9, 5e9)),
    syncer_learner_bytes=1e6,
)
SETTING = Setting(20, 10, Codec.INT4)


def planned(*sites: Site, setting: Setting = SETTING, **options: Any) -> Plan:
    defaults: dict[str, Any] = {"syncer": Site("syncer"), "prices": Prices(), "policy": Policy()}
    return plan(N, sites, setting, FIGURES, **(defaults | options))


def test_a_learner_sends_and_receives_each_parameter_once_in_h_steps() -> None:
    (learner,) = planned(Site("us", step_s=2.0, bandwidth_bits_per_s=1e9)).learners
    assert learner.up_bits_per_step == learner.down_bits_per_step == 4 * N / 20
    assert learner.bits_per_s == 4 * N / 40
    assert learner.paper_bits_per_s == learner.bits_per_s / 2
    assert learner.core_count == pytest.approx(1e-8 * N / 40)
    assert learner.memory_bytes == 2.5 * 4 * N
    assert learner.egress_bytes_per_month == pytest.approx(3600 * HOURS / 40 * N / 2)


def test_the_fastest_learner_sets_the_pace_and_slow_ones_move_more_a_step() -> None:
    found = planned(Site("fast", step_s=1.0), Site("slow", step_s=3.0))
    fast, slow = found.learners
    assert found.version_interval_s == 20
    assert fast.bits_per_s == slow.bits_per_s
    assert slow.up_bits_per_step == 3 * fast.up_bits_per_step


def test_measured_bits_replace_those_of_the_benchmark() -> None:
    (learner,) = planned(Site("us", step_s=1.0), bits=(3.0, 5.0)).learners
    assert (learner.up_bits_per_step, learner.down_bits_per_step) == (3 * N / 20, 5 * N / 20)
    assert learner.bits_per_s == 5 * N / 20, "the busier way counts"


def test_utilisation_is_what_step_leaves_and_what_the_link_carries() -> None:
    (learner,) = planned(Site("us", step_s=1.0)).learners
    assert learner.utilisation == pytest.approx(1 / 1.05), "a twentieth of 1e9 parameters moves in a step, at 1 ns each"
    assert learner.utilisation_at(0.1e9) == pytest.approx(learner.utilisation / 2), "0.2 Gbit/s are needed"
    (ranks,) = planned(Site("us", step_s=1.0, rank_count=5)).learners
    assert ranks.utilisation == pytest.approx(1 / 1.01)
    assert ranks.rank_memory_bytes == ranks.memory_bytes / 5


def test_a_link_that_is_too_narrow_is_refused_with_what_it_needs() -> None:
    found = planned(Site("us", step_s=1.0, bandwidth_bits_per_s=0.15e9), setting=replace(SETTING, fragment_count=100))
    assert found.refusals == ("us: 0.2 Gbit/s needed, 0.15 given",)
    assert planned(Site("us", step_s=1.0, bandwidth_bits_per_s=0.25e9)).refusals == ()


def test_a_version_that_comes_too_late_is_refused() -> None:
    found = planned(Site("us", step_s=1.0, bandwidth_bits_per_s=0.25e9), setting=replace(SETTING, fragment_count=1))
    # 16 s up, a step, 10 s of the syncer's CPU and 10 s of the learner's, 16 s down
    assert found.version_s == pytest.approx(53)
    assert found.refusals == ("us: a version takes 53 s, H steps take 20 s",)


def test_memory_that_is_too_small_is_refused_of_ranks_and_of_the_syncer() -> None:
    site = Site("us", step_s=1.0, memory_bytes=1e9, rank_count=5)
    found = planned(site, syncer=Site("syncer", memory_bytes=1e9, bandwidth_bits_per_s=1e8))
    assert found.refusals == (
        "syncer: 0.2 Gbit/s needed, 0.1 given",
        "syncer: a process needs 2.07 GB, 1 given",
        "us: a process needs 2 GB, 1 given",
    )


def test_the_store_grows_by_what_the_policy_keeps() -> None:
    found = planned(*(Site(name, step_s=1.0) for name in "abcd"), setting=Setting(20, 10, Codec.INT4))
    rounds = 3600 * HOURS / 20
    log_bytes = 10 * 2000 * 2.5
    # Four deltas and an update of half a byte a parameter, and every eighth round a snapshot of three vectors.
    assert found.written_bytes_per_month == pytest.approx(rounds * (2.5 * N + 1.5 * N + log_bytes))
    kept = 8 * 2.5 * N + 12 * N + 180 * N + 30 * (4 * N + 3.5 * 0.5 * N)
    assert found.stored_bytes == pytest.approx(kept + rounds * log_bytes)
    forever = planned(Site("a", step_s=1.0), policy=Policy(kept_version_count=10**6))
    assert forever.stored_bytes == forever.written_bytes_per_month


def test_requests_grow_with_learners_and_with_the_parts_of_a_delta() -> None:
    rounds = 3600 * HOURS / 20
    small = Setting(20, 1000, Codec.INT4)
    assert planned(Site("a", step_s=1.0), setting=small).puts_per_month == pytest.approx(rounds * 1000 * 5)
    two = planned(Site("a", step_s=1.0), Site("b", step_s=1.0), setting=small)
    assert two.puts_per_month == pytest.approx(rounds * 1000 * 7)
    assert planned(Site("a", step_s=1.0)).puts_per_month == pytest.approx(rounds * 10 * (5 + 11)), "50 MB in 12 parts"
    assert PART_BYTES == SUGGESTED_PART_BYTES


def test_costs_are_summed_where_prices_are_known() -> None:
    prices = Prices(egress=0.1, stored=0.02, puts=5.0, gets=0.4)
    found = planned(Site("us", step_s=1.0, price=2.0), syncer=Site("syncer", price=1.0), prices=prices)
    rounds = 3600 * HOURS / 20
    assert found.egress_bytes_per_month == pytest.approx(rounds * N)
    expected = 3 * HOURS + 0.1 * rounds * N / 1e9 + 0.02 * found.stored_bytes / 1e9
    expected += (5 * found.puts_per_month + 0.4 * found.gets_per_month) / 1e6
    assert found.cost_per_month == pytest.approx(expected)
    assert planned(Site("us", step_s=1.0)).cost_per_month is None
