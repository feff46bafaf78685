"""Which learners a round waits for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from skerry_syncer.rounds.engine import RoundEngine
from skerry_syncer.rounds.membership import LearnerView, MembershipView
from skerry_syncer.store.log.entries import (
    ClosedItem,
    LeftItem,
    SessionItem,
)
from skerry_syncer.store.log.state import LearnerState
from tests.unit.syncer.rounds.round_world import THREE, RoundWorld, closed, view


def test_a_first_round_does_not_wait_for_those_that_have_said_nothing() -> None:
    world = RoundWorld("eu", "us", "new", "newer")
    rates = {"eu": 100.0, "us": 90.0, "new": 0.0, "newer": 0.0}
    seen = MembershipView({name: LearnerView(True, 24, 0.1, rate) for name, rate in rates.items()}, 1000.0)
    world.accept("eu")
    world.accept("us")
    assert RoundEngine().decide(world.state, seen, 0.0).items


def test_a_fast_learner_of_small_batches_makes_nobody_else_slow() -> None:
    world = RoundWorld("big", "fast")
    world.accept("big", steps=8, tokens=800)
    world.accept("fast", steps=24, tokens=600)
    world.close_and_commit(closed(world, "big", "fast"))
    world.accept("fast", steps=24, tokens=600)
    assert not RoundEngine().decide(world.state, view("big", "fast"), 0.0).items


def test_a_newcomer_is_waited_for_until_two_rounds_have_closed_without_it() -> None:
    world = RoundWorld("eu", "us")
    world.accept("eu")
    assert not RoundEngine().decide(world.state, view("eu", "us"), 0.0).items  # the first round waits for all
    world.accept("us")
    world.close_and_commit(closed(world, "eu", "us"))
    world.append(SessionItem("new", "session-new", "here"))
    waits = []
    for _ in range(4):
        world.accept("eu")
        world.accept("us")
        waits.append(not RoundEngine().decide(world.state, view("eu", "us", "new"), 0.0).items)
        world.close_and_commit(closed(world, "eu", "us", "new"))
    assert waits == [True, True, False, False]


def test_a_contributor_is_expected_until_it_has_missed_two_rounds() -> None:
    world = RoundWorld("eu", "us")
    engine = RoundEngine()
    now = 0.0
    world.accept("eu")
    world.accept("us")
    world.close_and_commit(engine.decide(world.state, view("eu", "us"), now).items[0])
    waits = []
    for _ in range(3):
        now += 10
        world.accept("eu")
        decisions = engine.decide(world.state, view("eu"), now)
        waits.append(not decisions.items)
        if not decisions.items:
            assert decisions.wake_at_s is not None
            decisions = engine.decide(world.state, view("eu"), decisions.wake_at_s)
        world.close_and_commit(decisions.items[0])
    assert waits == [True, True, False]


def test_nobody_waits_for_a_learner_that_left() -> None:
    world = RoundWorld("eu", "us")
    world.append(LeftItem("us", "session-us"))
    world.accept("eu")
    (item,) = RoundEngine().decide(world.state, view("eu", "us"), 0.0).items
    assert isinstance(item, ClosedItem)
    assert item.participation == 1.0


def test_nobody_waits_for_a_live_learner_that_missed_two_closes() -> None:
    world = RoundWorld("eu", "us")
    world.accept("us")
    waits = []
    for _ in range(5):
        world.accept("eu")
        waits.append(not RoundEngine().decide(world.state, view("eu", "us"), 0.0).items)
        world.close_and_commit(closed(world, "eu", "us"))
    assert waits == [False, True, True, False, False]


class _Unwalked(dict[str, LearnerState]):
    """Learners that can be looked up, but not gone through."""

    def __iter__(self) -> Iterator[str]:
        raise AssertionError("a close goes through all learners that ever attached")

    def items(self) -> Any:
        return iter(self)

    def values(self) -> Any:
        return iter(self)


def test_a_close_costs_no_more_for_learners_that_are_gone() -> None:
    world = RoundWorld("eu", "us", "gone")
    world.accept("eu")
    world.accept("us")
    world.state.learners = _Unwalked(world.state.learners)
    assert len(RoundEngine().decide(world.state, view("eu", "us"), 0.0).items) == 1


def test_to_attach_again_is_no_work() -> None:
    """Learners that crash and attach anew in a loop neither damp the others' steps nor are waited for."""
    world = RoundWorld(*THREE)
    for name in THREE:
        world.accept(name)
    world.close_and_commit(closed(world, *THREE))
    looping = [f"loop-{index}" for index in range(6)]
    for turn in range(2):
        for name in looping:
            world.append(SessionItem(name, f"{name}-{turn}", "here"))
    for learner in THREE:
        world.accept(learner)
    seen = view(*THREE, *looping, step_count=10_000)
    (close,) = RoundEngine().decide(world.state, seen, 0.0).items
    assert isinstance(close, ClosedItem)
    assert close.participation == 1


def test_to_say_goodbye_and_attach_again_is_no_work() -> None:
    """The same, with a session that leaves and comes back before each round."""
    world = RoundWorld(*THREE, "loop")
    for _ in range(6):
        world.append(LeftItem("loop", "session-loop"), SessionItem("loop", "session-loop", "here"))
        for learner in THREE:
            world.accept(learner)
        items = RoundEngine().decide(world.state, view(*THREE, "loop"), 0.0).items
        close = world.close_and_commit(items[0] if items else closed(world, *THREE))
    assert items, "the last round waited for it"
    assert close.participation == 1


def test_a_learner_with_wrong_token_counts_still_has_the_others_waited_for() -> None:
    world = RoundWorld(*THREE)
    for learner in THREE:
        world.accept(learner, tokens=2**32 if learner == "ap" else None)
    world.close_and_commit(closed(world, *THREE))
    world.accept("ap", tokens=2**32)
    assert RoundEngine().decide(world.state, view(*THREE), 0.0).items == ()


def test_who_contributed_and_comes_back_is_waited_for() -> None:
    world = RoundWorld(*THREE)
    for name in THREE:
        world.accept(name)
    world.close_and_commit(closed(world, *THREE))
    for _ in range(2):
        world.accept("eu")
        world.accept("us")
        world.close_and_commit(closed(world, *THREE))
    world.append(SessionItem("ap", "another-session", "here"))
    world.accept("eu")
    world.accept("us")
    assert RoundEngine().decide(world.state, view(*THREE), 0.0).items == ()
    assert RoundEngine().decide(world.state, view("eu", "us"), 0.0).items != ()
