"""What a close records: members, weights, length and participation, and which deltas it refuses."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import pytest

from skerry.wire.policy import Policy
from skerry_syncer.rounds.closing import closed_without, references
from skerry_syncer.rounds.engine import RoundEngine
from skerry_syncer.rounds.membership import MembershipView
from skerry_syncer.store.log.entries import ClosedItem, Fate, FateItem, LeftItem, PolicyItem, SessionItem
from skerry_syncer.store.log.state import RunState
from tests.support.history import rolled_back
from tests.unit.syncer.rounds.round_world import SETTLED_S, THREE, RoundWorld, learner, view


@pytest.mark.parametrize(("steps", "weight"), [(0, 0.0), (12, 0.5), (24, 1.0), (48, 1.0)])
def test_a_newcomer_counts_with_what_its_reported_steps_would_bring(steps: int, weight: float) -> None:
    world = RoundWorld("eu", "new")
    world.accept("eu")
    seen = MembershipView({"eu": learner(), "new": learner(step_count=steps)}, SETTLED_S)
    assert world.closed_in(seen).participation == pytest.approx(1 / (1 + weight))


def test_a_set_that_is_closed_again_goes_by_the_policy_that_it_was_closed_under() -> None:
    world = RoundWorld("eu", "us", "ap")
    world.accept("eu", steps=24, tokens=2400)
    world.accept("us", steps=96, tokens=9600)  # counts as 48 steps, twice H
    unreadable = world.accept("ap")
    live = view("eu", "us", "ap")
    closing = world.closed_in(live)
    world.add(closing)
    world.add(PolicyItem("e" * 32, Policy(inner_step_count=48)))
    again = closed_without(world.state, live, closing, unreadable)
    assert again is not None
    assert again.members == closing.members[:2]
    assert [member.weight for member in again.members] == [2400, 4800]


def test_a_stale_delta_is_damped_in_weight_and_in_the_step() -> None:
    world = RoundWorld("eu", "us")
    for _ in range(3):
        world.round("eu")
    world.add(LeftItem("eu", "session-eu"))
    world.accept("us", base=0)
    item = world.closed("us")
    assert item.members[0].staleness == 3
    # (1 + 3)^-0.5, and 24 steps while the run went on by 72 and half of this round's
    assert item.members[0].weight == pytest.approx(2400 / 2 * 24 / 84)
    assert item.participation == pytest.approx(0.5)


def test_a_version_that_only_some_made_makes_nobodys_answer_stale() -> None:
    """Of four that are merged one by one, each makes a version: a quarter of a round, while deltas are on their way."""
    world = RoundWorld("a1", "a2", "a3", "a4")
    for name in ("a1", "a2"):
        world.round(name, live=("a1", "a2", "a3", "a4"))
    world.accept("a3", base=1)
    item = world.closed("a1", "a2", "a3", "a4")
    assert item.members[0].staleness == 1
    assert item.members[0].weight == 2400
    assert item.participation == pytest.approx(0.25)


def test_an_outlier_is_quarantined_by_name_and_the_rest_is_merged() -> None:
    world = RoundWorld("eu", "us", "ap", policy=Policy(quorum_count=3))  # to which the outlier counts
    good = [world.accept("eu"), world.accept("us", norm=2.0)]
    bad = world.accept("ap", norm=1e4)
    close = world.closed("eu", "us", "ap")
    assert [member.delta for member in close.members] == good
    assert [(decided.delta, decided.fate) for decided in close.decided] == [(bad, Fate.QUARANTINED)]


def test_what_comes_again_as_large_from_a_learner_alone_is_training() -> None:
    """Nobody else bears it out, and the same steps from the same weights lead there for ever."""
    world = RoundWorld("eu")
    world.round("eu")
    for norm in (1e4, 1e8):  # the second is as far from the first as that from what was merged
        world.accept("eu", norm=norm)
        (item,) = RoundEngine().decide(world.state, view("eu"), 0.0).items
        assert isinstance(item, FateItem)
        world.add(item)
    world.accept("eu", norm=3e7)
    assert len(world.closed("eu").members) == 1


def cosine(step: int, step_count: int) -> float:
    """Returns a rate that warms up over a tenth of the steps and falls to 0 at their end."""
    warm_up = step_count // 10
    if step < warm_up:
        return step / warm_up
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warm_up) / (step_count - warm_up))))


def restarts(step: int) -> float:
    return 0.5 * (1 + math.cos(math.pi * (step % 240 + 0.5) / 240))


class Training(NamedTuple):
    """How a learner trains: a delta's norm is the sum of the rates of its steps, as under Adam."""

    rate: Callable[[int], float]  # of its own step
    begin: int = 0
    step_count: int = 600  # after which it leaves
    slowness: int = 1


def usual(step: int) -> float:
    return cosine(step, 600)


IN_FULL = {
    "schedules that end at 0 at different times": [Training(usual), Training(usual), Training(usual, slowness=3)],
    "warm restarts after everybody else left": [
        Training(restarts, step_count=240),
        Training(restarts, step_count=1200),
    ],
    "a late joiner at full rate": [
        Training(usual),
        Training(usual),
        Training(lambda _: 1.0, begin=560, step_count=300),
    ],
    "one fine-tuner among others": [Training(usual), Training(usual), Training(lambda _: 0.001)],
}

CLIPPED = {
    "a rate that becomes tenfold": [
        Training(usual),
        Training(usual),
        Training(lambda step: (10 if step > 300 else 1) * usual(step)),
    ],
    "fine-tuning beside pre-training": [
        Training(lambda _: 0.01, step_count=900),
        Training(lambda _: 0.01, step_count=900),
        Training(usual),
    ],
}


def trained(trainings: list[Training]) -> tuple[RunState, float]:
    """Returns a run of these learners, and by how many times a delta exceeded what its peers did, at most."""
    names = [f"learner-{index}" for index in range(len(trainings))]
    world = RoundWorld(*names)
    working = dict(zip(names, trainings, strict=True))
    steps, sent, largest = dict.fromkeys(names, 0), dict.fromkeys(names, 0), 0.0
    for now in range(1, 2000):
        for name, training in working.items():
            steps[name] += now > training.begin and now % training.slowness == 0
        left = [name for name, training in working.items() if steps[name] == training.step_count]
        if not left and all(steps[name] < sent[name] + 24 for name in names):
            continue
        for name in [name for name in names if steps[name] > sent[name]]:
            norm = math.fsum(map(working[name].rate, range(sent[name], steps[name])))
            world.accept(name, steps=steps[name] - sent[name], last_step=steps[name], norm=norm)
        sent = steps.copy()
        fragment = world.state.fragments["a"]
        items = [delta.item for delta in fragment.pending.values()]
        for item, (usual_norm,) in zip(items, references(world.state, fragment, items), strict=True):
            largest = max(largest, item.norm_a_step / usual_norm)
        seen = {name: learner(step_count=steps[name], is_ending=name in left) for name in working}
        world.close_and_commit(world.closed_in(MembershipView(seen, SETTLED_S)))
        for name in left:
            world.add(LeftItem(name, f"session-{name}"))
            del working[name]
    assert not working
    return world.state, largest


@pytest.mark.parametrize("name", IN_FULL | CLIPPED)
def test_no_delta_of_an_honest_learner_is_refused_and_those_of_rates_that_fall_at_other_times_count_in_full(
    name: str,
) -> None:
    state, largest = trained((IN_FULL | CLIPPED)[name])
    assert {delta.reason for delta in state.deltas.values() if delta.fate is not Fate.MERGED} == set()
    assert name in CLIPPED or largest < 2.0


def test_weights_of_long_ago_and_rates_100_times_too_high_count_for_little_after_the_others_rates_have_fallen() -> None:
    for rate in (lambda _: 1.0, lambda step: 100 * usual(step)):
        world = RoundWorld(*"abc")
        for step in range(24, 601, 24):
            for name in "abc":
                own = rate if name == "c" else usual
                norm = math.fsum(map(own, range(step - 24, step)))
                world.accept(name, last_step=step, norm=norm)
            fragment = world.state.fragments["a"]
            items = [delta.item for delta in fragment.pending.values()]
            ratios = [
                item.norm_a_step / norm
                for item, (norm,) in zip(items, references(world.state, fragment, items), strict=True)
            ]
            world.round(live="abc")
        assert ratios[2] > 20
        assert max(ratios[:2]) <= 1


@pytest.mark.parametrize(
    ("deltas", "progress"),
    [
        pytest.param([(24, 2400), (8, 800)], 24, id="the median token's delta says how long the round is"),
        pytest.param([(8, 800), (8, 800), (24, 600)], 8, id="a third, faster, of small batches changes nothing"),
        pytest.param([(1000, 1000), (900, 900)], 900, id="an outage of everybody counts as far as all trained"),
        pytest.param([(60, 60), (60, 60)], 60, id="a syncer slower than H steps holds up all"),
        pytest.param([(200, 200), (24, 24)], 24, id="one learner that returns moves the run by a round"),
        pytest.param(
            [(1000, 1000)] * 7 + [(5, 5)], 1000, id="one that brought what it had before the outage changes nothing"
        ),
    ],
)
def test_a_joint_round_takes_the_run_as_far_as_its_deltas_say(deltas: list[tuple[int, int]], progress: int) -> None:
    names = [f"learner-{index}" for index in range(len(deltas))]
    world = RoundWorld(*names)
    for turn in (1, 2):
        for name, (steps, tokens) in zip(names, deltas, strict=True):
            world.accept(name, steps=steps, tokens=tokens)
        world.round(live=names)
        assert world.state.step_count == pytest.approx(turn * progress)


def test_what_a_late_learner_brings_when_the_others_have_left_is_no_outage() -> None:
    world = RoundWorld("eu", "late")
    for base in (0, None, None, 1):  # of the late one's delta
        world.accept("eu")
        if base is not None:
            world.accept("late", base=base)
        world.round(live=["eu"])
    world.add(LeftItem("eu", "session-eu"))
    before = world.state.step_count
    world.accept("late", steps=68)
    assert world.round(live=["late"]).participation == 1.0
    assert world.state.step_count - before == pytest.approx(24)


def test_a_silent_learner_damps_the_others_for_a_round_or_two_whatever_its_lease_says() -> None:
    world = RoundWorld("eu", "us")
    shares = []
    for number in range(6):
        world.accept("eu")
        if number == 0:
            world.accept("us")
        shares.append(world.round(live=("eu", "us")).participation)
    assert shares == pytest.approx([1.0, 0.5, 0.5, 0.5, 1.0, 1.0])


def test_learners_one_contributor_in_turn_each_count_their_share() -> None:
    world = RoundWorld("a1", "a2", "a3", "a4")
    for _ in range(3):
        for name in ("a1", "a2", "a3", "a4"):
            close = world.round(name, live=("a1", "a2", "a3", "a4"))
            assert close.participation == pytest.approx(0.25)
    assert world.state.step_count == pytest.approx(3 * 24)


MOST = 2**32


def joint(world: RoundWorld, *, steps: int = 24, tokens: int | None = None) -> ClosedItem:
    """Closes and commits a round of three, of which the last one counts wrongly."""
    world.accept("eu")
    world.accept("us")
    world.accept("ap", steps=steps, tokens=tokens, last_step=MOST)
    return world.round(live=THREE)


def test_a_thousandfold_token_count_weighs_the_median_and_does_not_stop_the_rounds_that_it_misses() -> None:
    world = RoundWorld(*THREE)
    close = joint(world, tokens=24 * MOST)
    assert [member.weight for member in close.members] == [2400, 2400, pytest.approx(2400)]
    world.accept("eu")
    world.accept("us")
    assert world.closed(*THREE).participation == pytest.approx(2 / 3)


def test_several_doubted_deltas_of_one_learner_count_as_one_median_together() -> None:
    world = RoundWorld(*THREE)
    for _ in range(2):
        world.round("eu", "us", live=THREE)
    world.accept("eu")
    world.accept("us")
    for base in (0, 1, 2):
        world.accept("ap", base=base, tokens=200 * 2400)
    assert sum(member.weight for member in world.closed(*THREE).members[2:]) <= 2400 + 1e-6


def test_a_learner_that_takes_half_of_the_runs_steps_has_half_its_weight_and_is_missed_for_half_of_it() -> None:
    world = RoundWorld("eu", "us")
    for _ in range(2):
        assert world.round("eu", live=("eu", "us")).participation == 0.5
    assert [member.weight for member in world.round("eu", "us").members] == [2400, 1200]  # 24 steps for the run's 48
    assert world.round("eu", live=("eu", "us")).participation == pytest.approx(2 / 3)


def test_a_learner_that_comes_back_counts_from_where_it_attached() -> None:
    world = RoundWorld("eu", "us")
    world.round("eu", "us")
    for _ in range(4):
        world.round("eu", live=("eu",))
    world.add(SessionItem("us", "session-2", "here"))
    world.accept("eu")
    world.accept("us", session="session-2")
    assert [member.weight for member in world.closed("eu", "us").members] == [2400, 2400]


def test_after_a_roll_back_learners_count_as_before_it_whenever_they_attached() -> None:
    world = RoundWorld("eu", "us")
    for _ in range(20):
        world.round("eu", "us")
    world.add(SessionItem("late", "session-late", "here"))  # at step 480
    for _ in range(10):
        world.round("eu", "us", "late")
    world.add(rolled_back("r", 2, 31, "a"))  # to step 48
    weights = [member.weight for member in world.round("eu", "us", "late").members]
    assert weights == [2400, 2400, 2400]
    for _ in range(3):
        world.round("eu", "us", live=("eu", "us", "late"))
    slow = world.round("eu", "us", "late").members[-1]
    assert slow.weight == pytest.approx(800)  # 24 steps for the run's 72: 16 in each round that missed it, and 24


def test_an_unequal_learner_of_two_keeps_its_weight() -> None:
    world = RoundWorld("eu", "us")
    world.accept("eu", tokens=24 * 100)
    world.accept("us", tokens=24 * 5)
    assert [member.weight for member in world.closed("eu", "us").members] == [2400, 120]


def test_many_claimed_steps_neither_lengthen_the_round_nor_have_honest_deltas_refused() -> None:
    world = RoundWorld(*THREE)
    for _ in range(10):
        close = joint(world, steps=MOST)
        assert close.length == 24
        assert close.decided == ()
    assert world.state.fragments["a"].newest.step_count == pytest.approx(240)


def test_a_norm_is_judged_by_the_step_that_would_be_taken() -> None:
    """A short delta's is small, however few steps it claims; of a long one a round's share is taken."""
    world = RoundWorld(*THREE)
    joint(world)
    world.accept("eu")
    world.accept("us", steps=2, norm=3.0)
    world.accept("ap", steps=480, norm=20.0, last_step=480)
    assert world.round(live=THREE).decided == ()
    world.accept("eu")
    world.accept("ap", last_step=504)
    huge = world.accept("us", steps=2, norm=5e5)
    assert [decided.delta for decided in world.closed(*THREE).decided] == [huge]


def test_who_sends_next_to_nothing_has_nobody_refused() -> None:
    world = RoundWorld("eu", "us")
    world.round("eu", live=("eu", "us"))
    for _ in range(3):
        world.accept("us", norm=1e-9)
        assert world.round("eu", live=("eu", "us")).decided == ()
