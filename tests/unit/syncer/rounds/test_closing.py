"""What one learner claims or sends can't take over a run, stop it or have the others refused."""

from __future__ import annotations

import pytest

from skerry.wire.policy import Policy
from skerry_syncer.rounds.engine import RoundEngine
from skerry_syncer.rounds.membership import LearnerView, MembershipView
from skerry_syncer.store.log.entries import (
    ClosedItem,
    Fate,
    FateItem,
    LeftItem,
    SessionItem,
)
from tests.unit.syncer.rounds.round_world import SETTLED_S, RoundWorld, view

MOST = 2**32
THREE = ("eu", "us", "ap")


def round_of(world: RoundWorld, *live: str) -> ClosedItem:
    """Returns the close that an engine comes to once any grace is over."""
    engine = RoundEngine()
    for now_s in (0.0, 1e6):
        items = engine.decide(world.state, view(*live), now_s).items
        if items:
            break
    (item,) = items
    assert isinstance(item, ClosedItem)
    return item


def joint(world: RoundWorld, *, steps: int = 24, tokens: int | None = None) -> ClosedItem:
    """Closes and commits a round of three, of which the last one lies."""
    world.accept("eu")
    world.accept("us")
    world.accept("ap", steps=steps, tokens=tokens, last_step=MOST)
    return world.close_and_commit(round_of(world, *THREE))


def test_tokens_that_nobody_else_has_make_no_majority() -> None:
    world = RoundWorld(*THREE)
    close = joint(world, tokens=24 * MOST)
    weights = [member.weight for member in close.members]
    assert weights == [2400, 2400, pytest.approx(2 * 2400)]


def test_who_claimed_such_tokens_does_not_stop_the_rounds_that_it_misses() -> None:
    world = RoundWorld(*THREE)
    joint(world, tokens=24 * MOST)
    world.accept("eu")
    world.accept("us")
    assert round_of(world, *THREE).participation == pytest.approx(2 / 4)


def test_several_deltas_of_one_learner_together_count_for_no_more() -> None:
    world = RoundWorld(*THREE)
    for _ in range(2):
        world.accept("eu")
        world.accept("us")
        world.close_and_commit(round_of(world, *THREE))
    world.accept("eu")
    world.accept("us")
    for base in (0, 1, 2):
        world.accept("ap", base=base)
    close = round_of(world, *THREE)
    assert sum(member.weight for member in close.members[2:]) <= 2 * 2400 + 1e-6


def test_an_unequal_learner_of_two_keeps_its_weight() -> None:
    world = RoundWorld("eu", "us")
    world.accept("eu", tokens=24 * 100)
    world.accept("us", tokens=24 * 5)
    assert [member.weight for member in round_of(world, "eu", "us").members] == [2400, 120]


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
    assert world.close_and_commit(round_of(world, *THREE)).decided == ()
    world.accept("eu")
    world.accept("ap", last_step=504)
    huge = world.accept("us", steps=2, norm=5e5)
    assert [one.delta for one in round_of(world, *THREE).decided] == [huge]


def test_who_sends_next_to_nothing_has_nobody_refused() -> None:
    world = RoundWorld("eu", "us")
    world.accept("eu")
    world.close_and_commit(round_of(world, "eu", "us"))
    for _ in range(3):
        world.accept("eu")
        world.accept("us", norm=1e-9)
        assert world.close_and_commit(round_of(world, "eu", "us")).decided == ()


def test_a_quorum_of_all_goes_on_when_one_is_quarantined() -> None:
    world = RoundWorld(*THREE, policy=Policy(quorum_count=3))
    joint(world)
    world.accept("eu")
    world.accept("us")
    world.accept("ap", norm=1e6)
    close = round_of(world, *THREE)
    assert len(close.members) == 2
    assert [one.fate for one in close.decided] == [Fate.QUARANTINED]


def test_to_attach_again_is_no_work() -> None:
    """Ghosts that attach with ever new sessions, and report much, neither damp the others' steps nor are waited for."""
    world = RoundWorld(*THREE)
    joint(world)
    ghosts = [f"ghost-{index}" for index in range(6)]
    for turn in range(2):
        for ghost in ghosts:
            world.append(SessionItem(ghost, f"{ghost}-{turn}", "here"))
    for learner in THREE:
        world.accept(learner)
    seen = view(*THREE, *ghosts, step_count=10_000)
    (close,) = RoundEngine().decide(world.state, seen, 0.0).items
    assert isinstance(close, ClosedItem)
    assert close.participation == 1


def test_to_say_goodbye_and_attach_again_is_no_work() -> None:
    """The same, with a session that leaves and comes back before each round."""
    world = RoundWorld(*THREE, "ghost")
    for _ in range(6):
        world.append(LeftItem("ghost", "session-ghost"), SessionItem("ghost", "session-ghost", "here"))
        for learner in THREE:
            world.accept(learner)
        items = RoundEngine().decide(world.state, view(*THREE, "ghost"), 0.0).items
        close = world.close_and_commit(items[0] if items else round_of(world, *THREE))
    assert items, "the last round waited for the ghost"
    assert close.participation == 1


def test_a_liar_that_claims_many_tokens_still_has_the_others_waited_for() -> None:
    world = RoundWorld(*THREE)
    for learner in THREE:
        world.accept(learner, tokens=2**32 if learner == "ap" else None)
    world.close_and_commit(round_of(world, *THREE))
    world.accept("ap", tokens=2**32)
    assert RoundEngine().decide(world.state, view(*THREE), 0.0).items == ()


def test_who_contributed_and_comes_back_is_waited_for() -> None:
    world = RoundWorld(*THREE)
    joint(world)
    for _ in range(2):
        world.accept("eu")
        world.accept("us")
        world.close_and_commit(round_of(world, *THREE))
    world.append(SessionItem("ap", "another-session", "here"))
    world.accept("eu")
    world.accept("us")
    assert RoundEngine().decide(world.state, view(*THREE), 0.0).items == ()
    assert RoundEngine().decide(world.state, view("eu", "us"), 0.0).items != ()


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
