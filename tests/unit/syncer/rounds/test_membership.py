"""Which learners a round waits for."""

from __future__ import annotations

import pytest

from skerry_syncer.rounds.engine import RoundEngine
from skerry_syncer.rounds.membership import MembershipView
from skerry_syncer.store.log.entries import LeftItem, SessionItem
from tests.unit.syncer.rounds.round_world import SETTLED_S, THREE, RoundWorld, is_closed, learner, view


def test_a_first_round_does_not_wait_for_those_that_have_said_nothing() -> None:
    world = RoundWorld("eu", "us", "new", "newer")
    tokens = {"eu": 240, "us": 216, "new": 0, "newer": 0}
    seen = MembershipView({name: learner(token_count=count) for name, count in tokens.items()}, SETTLED_S)
    world.accept("eu")
    world.accept("us")
    assert RoundEngine().decide(world.state, seen, 0.0).items


def test_a_fast_learner_of_small_batches_makes_nobody_else_slow() -> None:
    world = RoundWorld("big", "fast")
    world.accept("big", steps=8, tokens=800)
    world.accept("fast", steps=24, tokens=600)
    world.round(live=("big", "fast"))
    world.accept("fast", steps=24, tokens=600)
    assert not is_closed(world, "big", "fast")


def test_a_newcomer_is_waited_for_until_two_rounds_have_closed_without_it() -> None:
    world = RoundWorld("eu", "us")
    world.accept("eu")
    assert not is_closed(world, "eu", "us")  # the first round waits for all
    world.round("us", live=["eu", "us"])
    world.add(SessionItem("new", "session-new", "here"))
    waits = []
    for _ in range(4):
        world.accept("eu")
        world.accept("us")
        waits.append(not is_closed(world, "eu", "us", "new"))
        world.round(live=("eu", "us", "new"))
    assert waits == [True, True, False, False]


@pytest.mark.parametrize("live", [("eu",), ("eu", "us")])
def test_a_contributor_is_expected_until_it_has_missed_two_rounds_whatever_its_lease_says(live: tuple[str]) -> None:
    world = RoundWorld("eu", "us")
    world.round("eu", "us")
    waits = []
    for _ in range(4):
        world.accept("eu")
        waits.append(not is_closed(world, *live))
        world.round(live=live)
    assert waits == [True, True, False, False]


def test_nobody_waits_for_a_learner_that_left() -> None:
    world = RoundWorld("eu", "us")
    world.add(LeftItem("us", "session-us"))
    world.accept("eu")
    assert is_closed(world, "eu", "us")
    assert world.closed("eu", "us").participation == 1.0


def test_to_attach_again_is_no_work() -> None:
    """Learners that crash, or say goodbye, and attach anew in a loop neither damp the others' steps nor are awaited."""
    crashing = [f"crash-{index}" for index in range(6)]
    world = RoundWorld(*THREE, "loop")
    live = (*THREE, *crashing, "loop")
    for turn in range(6):
        world.add(LeftItem("loop", "session-loop"), SessionItem("loop", "session-loop", "here"))
        for name in crashing:
            world.add(SessionItem(name, f"{name}-{turn}", "here"))
        for name in THREE:
            world.accept(name)
        is_awaited = not is_closed(world, *live, step_count=10_000)
        close = world.round(live=live)
    assert not is_awaited
    assert close.participation == 1


def test_a_learner_with_wrong_token_counts_still_has_the_others_waited_for() -> None:
    world = RoundWorld(*THREE)
    for name in THREE:
        world.accept(name, tokens=2**32 if name == "ap" else None)
    world.round(live=THREE)
    world.accept("ap", tokens=2**32)
    assert not is_closed(world, *THREE)


def test_who_contributed_and_comes_back_is_waited_for() -> None:
    world = RoundWorld(*THREE)
    world.round(*THREE)
    world.round("eu", "us")
    world.round("eu", "us")
    world.add(SessionItem("ap", "another-session", "here"))
    world.accept("eu")
    world.accept("us")
    assert not is_closed(world, *THREE)
    assert RoundEngine().decide(world.state, view("eu", "us"), 0.0).items
