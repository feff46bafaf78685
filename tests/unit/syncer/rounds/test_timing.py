"""How long a round waits."""

from __future__ import annotations

import pytest

from skerry.wire.policy import Policy
from skerry_syncer.rounds.engine import RoundEngine
from skerry_syncer.rounds.membership import LearnerView, MembershipView
from skerry_syncer.store.log.entries import (
    Decided,
    Fate,
    FateItem,
)
from tests.unit.syncer.rounds.round_world import SETTLED_S, THREE, RoundWorld, view


def test_a_round_that_waited_for_ever_leaves_later_ones_their_grace() -> None:
    """One that leaves behind a short delta opens a round, which closes when the others are back, hours later."""
    world, engine = RoundWorld("eu", "us", policy=Policy(quorum_count=2)), RoundEngine()
    world.accept("eu", steps=5)
    ending = MembershipView({"eu": LearnerView(True, 8, 0.1, is_flushing=True)}, 1e3)
    engine.decide(world.state, ending, 0.0)
    engine.decide(world.state, view(), 10.0)
    assert engine.open_since_s() == []
    engine.decide(world.state, ending, 20.0)  # this one stays open
    both, now_s = view("eu", "us"), 36_000.0
    for turn in range(6):
        world.accept("us")
        if turn:
            world.accept("eu")
        (item,) = engine.decide(world.state, both, now_s).items
        world.close_and_commit(item)
        engine.decide(world.state, both, now_s)
        now_s += 10.0
    assert engine.timing.grace_s(world.state.policy, both, ["eu", "us"]) > 0


def test_a_round_whose_deltas_were_given_up_leaves_the_next_its_grace() -> None:
    world = RoundWorld("eu", "us")
    engine = RoundEngine()
    bad = world.accept("eu")
    assert engine.decide(world.state, view("eu", "us"), 0.0).items == ()
    world.append(FateItem((Decided(bad, Fate.EXPIRED, "the run was rolled back"),)))
    assert engine.decide(world.state, view("eu", "us"), 5.0).items == ()
    world.accept("us")
    assert engine.decide(world.state, view("eu", "us"), 10.0).items == ()


def test_lateness_that_was_seen_lengthens_the_grace_up_to_its_bound() -> None:
    policy = Policy(delay_step_count=1000)
    world = RoundWorld("eu", "us", policy=policy)
    engine = RoundEngine()
    short_s = engine.timing.grace_s(policy, view("eu", "us"), {"eu", "us"})
    now_s = 0.0
    for _ in range(3):
        world.accept("eu")
        engine.decide(world.state, view("eu", "us"), now_s)
        world.accept("us", steps=20)
        (item,) = engine.decide(world.state, view("eu", "us"), now_s + 0.1).items
        world.close_and_commit(item)
        now_s += 1
    long_s = engine.timing.grace_s(policy, view("eu", "us"), {"eu", "us"})
    assert long_s == pytest.approx(short_s + 2 * 0.1)


def test_the_grace_covers_a_learner_twice_as_slow_and_no_step_that_nobody_waits_for() -> None:
    pace = {"eu": 0.1, "twice": 0.2, "ten": 1.0}
    seen = MembershipView({name: LearnerView(True, 24, time_s) for name, time_s in pace.items()}, 1000.0)
    assert 0.2 <= RoundEngine().timing.grace_s(Policy(), seen, {"eu", "twice"}) < 0.5


def test_an_early_delta_says_nothing_of_lateness_and_lets_its_round_close_at_once() -> None:
    world = RoundWorld("eu", "slow")
    engine = RoundEngine()
    before_s = engine.timing.grace_s(world.state.policy, view("eu", "slow"), {"eu"})
    for number in range(4):
        world.accept("slow", steps=8)
        assert engine.decide(world.state, view("eu", "slow", step_count=0), 10.0 * number).items == ()
        world.accept("eu")
        (item,) = engine.decide(world.state, view("eu", "slow"), 10.0 * number + 5).items
        world.close_and_commit(item)
        engine.decide(world.state, view("eu", "slow"), 10.0 * number + 5)
    assert engine.timing.grace_s(world.state.policy, view("eu", "slow"), {"eu"}) == pytest.approx(before_s)


def test_pace_comes_from_accepted_deltas_and_not_from_reports() -> None:
    world, engine = RoundWorld(*THREE, policy=Policy(quorum_count=3)), RoundEngine()
    true_s = {"eu": 1.0, "us": 1.0, "ap": 1e-9}
    reported = MembershipView({name: LearnerView(True, 24, step_s) for name, step_s in true_s.items()}, SETTLED_S)
    for turn in (1, 2):
        for learner in THREE:
            world.accept(learner, last_step=24 * turn)
        (item,) = engine.decide(world.state, reported, 24.0 * turn).items
        assert not isinstance(item, FateItem)
        world.close_and_commit(item)
        engine.decide(world.state, reported, 24.0 * turn)
    assert engine.timing.grace_s(world.state.policy, reported, ["ap"]) == pytest.approx(1.5)
