"""When rounds open and close, and who merges them."""

from __future__ import annotations

import pytest

from skerry.wire.policy import Policy
from skerry_syncer.merge.merger import UPDATE_OBJECT_SPANS
from skerry_syncer.rounds.engine import RoundEngine
from skerry_syncer.rounds.membership import LearnerView, MembershipView
from skerry_syncer.rounds.timing import MergeKey
from skerry_syncer.run.lifecycle import MAX_FRAGMENT_NUMEL, MAX_TENSOR_COUNT
from skerry_syncer.run.push import SUGGESTED_PART_BYTES
from skerry_syncer.store.log.entries import (
    AcceptedItem,
    ClosedItem,
    Fate,
    FateItem,
    Item,
    LeftItem,
    ObjectRef,
    PolicyItem,
    RunStatus,
    StatusItem,
    canonical_json,
    item_to_json,
)
from skerry_syncer.store.log.run_log import MAX_APPEND_BYTES
from skerry_syncer.store.log.state import RunState
from tests.unit.syncer.rounds.round_world import RoundWorld, closed, view


def test_a_round_closes_at_once_when_every_live_learner_is_in_it() -> None:
    world = RoundWorld("eu", "us")
    first, second = world.accept("eu"), world.accept("us", steps=3)
    (item,) = RoundEngine().decide(world.state, view("eu", "us"), 0.0).items
    assert isinstance(item, ClosedItem)
    assert [member.delta for member in item.members] == [first, second]
    assert item.participation == 1.0


def test_a_round_waits_for_a_missing_learner_no_longer_than_its_grace() -> None:
    world = RoundWorld("eu", "us")
    world.accept("eu")
    engine = RoundEngine()
    waiting = engine.decide(world.state, view("eu", "us"), 10.0)
    # gamma * tau * xi_step = 0.5 * 12 * 0.1 s is above 1.5 steps, which therefore bound the grace.
    assert waiting.items == ()
    assert waiting.wake_at_s == pytest.approx(10.15)
    (item,) = engine.decide(world.state, view("eu", "us"), 10.15).items
    assert isinstance(item, ClosedItem)


def test_negative_slack_closes_at_quorum() -> None:
    world = RoundWorld("eu", "us", policy=Policy(delay_step_count=0))
    world.accept("eu")
    (item,) = RoundEngine().decide(world.state, view("eu", "us"), 0.0).items
    assert isinstance(item, ClosedItem)


def test_a_round_does_not_close_below_its_quorum() -> None:
    world = RoundWorld("eu", "us", policy=Policy(quorum_count=2))
    world.accept("eu")
    engine = RoundEngine()
    decisions = engine.decide(world.state, view("eu"), 0.0)
    assert decisions.items == ()
    assert decisions.wake_at_s is None
    world.accept("us", steps=1)
    assert len(engine.decide(world.state, view("eu", "us"), 99.0).items) == 1


def test_fewer_than_h_steps_open_no_round() -> None:
    world = RoundWorld("eu")
    world.accept("eu", steps=23)
    assert RoundEngine().decide(world.state, view("eu"), 0.0).items == ()


def test_a_short_delta_closes_once_its_learner_has_trained_h_steps_more() -> None:
    world = RoundWorld("eu")
    world.accept("eu", steps=5, last_step=29)
    engine = RoundEngine()
    assert engine.decide(world.state, view("eu", step_count=52), 0.0).items == ()
    assert len(engine.decide(world.state, view("eu", step_count=53), 1.0).items) == 1


def test_a_short_delta_closes_at_once_when_its_learner_trains_no_more() -> None:
    world = RoundWorld("eu")
    world.accept("eu", steps=5)
    seen = {
        is_live: MembershipView({"eu": LearnerView(is_live, 8, 0.1, is_flushing=True)}, 1e3)
        for is_live in (True, False)
    }
    engine = RoundEngine()
    assert engine.open_rounds(world.state, seen[True]) == (("a", 1),)
    assert len(engine.decide(world.state, seen[True], 0.0).items) == 1
    assert engine.open_rounds(world.state, seen[False]) == (), "it is gone"


def test_a_short_delta_closes_at_once_when_its_learner_has_left() -> None:
    world = RoundWorld("eu")
    world.accept("eu", steps=5)
    assert RoundEngine().decide(world.state, view(), 0.0).items == (), "it is lost, and may come back"
    world.append(LeftItem("eu", "session-eu"))
    assert len(RoundEngine().decide(world.state, view(), 0.0).items) == 1


def test_while_the_view_is_young_the_first_learner_back_is_not_everybody() -> None:
    world = RoundWorld("eu", "us")
    world.accept("eu")
    engine = RoundEngine()
    young = view("eu", age_s=1.0)
    decisions = engine.decide(world.state, young, 0.0)
    assert decisions.items == ()
    assert decisions.wake_at_s == pytest.approx(0.15)


def test_a_set_whose_commit_would_not_fit_one_entry_is_merged_in_several_rounds() -> None:
    learners = [f"l{at:02}" for at in range(16)]
    world = RoundWorld(*learners, tensor_count=MAX_TENSOR_COUNT)
    waiting = [world.accept(name) for name in learners]
    update = _refs("updates/a/1-" + "0" * 32, MAX_FRAGMENT_NUMEL, UPDATE_OBJECT_SPANS * 2**20)
    engine, merged = RoundEngine(), list[str]()
    for at in range(4):  # the second round waits for its grace, since not all are in it
        for item in engine.decide(world.state, view(*learners), 1000.0 * at).items:
            assert isinstance(item, ClosedItem)
            world.append(item)
            assert _size_bytes(world.commit(update)) <= MAX_APPEND_BYTES
            merged += [member.delta for member in item.members]
    assert merged == waiting


def test_the_largest_fragment_fits_one_entry_in_parts_of_the_suggested_size() -> None:
    name = "f" * 64
    parts = _refs(
        f"deltas/{name}/{'0' * 32}/{2**35}-{2**20}-{'0' * 64}-{'0' * 32}", MAX_FRAGMENT_NUMEL, SUGGESTED_PART_BYTES // 4
    )
    norms = (1.2345678901234567e-100,) * MAX_TENSOR_COUNT
    ids = ("0" * 32, name, name, "0" * 32)
    item = AcceptedItem(*ids, 2**31, "0" * 64, "0" * 64, parts, 2**31, 2**52, 2**31, norms)
    assert _size_bytes(item) <= MAX_APPEND_BYTES


def _refs(name: str, numel: int, each: int) -> tuple[ObjectRef, ...]:
    return tuple(ObjectRef(name, first, each, 4 * each, "0" * 64) for first in range(0, numel, each))


def _size_bytes(item: Item) -> int:
    return len(canonical_json(item_to_json(item)))


def test_a_delta_staler_than_the_policy_allows_expires_by_name() -> None:
    world = RoundWorld("eu", "us", policy=Policy(max_staleness=1))
    late = world.accept("us")
    for _ in range(2):  # the late one is pending while two versions pass without it
        fragment = world.state.fragments["a"]
        world.accept("eu")
        close = closed(world, "eu", "us")
        kept = tuple(member for member in close.members if member.delta != late)
        world.close_and_commit(ClosedItem("a", fragment.version + 1, 0, kept, 1.0, (), 24.0))
    world.accept("eu")
    close = closed(world, "eu", "us")
    assert [(one.delta, one.fate) for one in close.decided] == [(late, Fate.EXPIRED)]
    assert late not in [member.delta for member in close.members]


def test_max_staleness_counts_rounds_and_not_versions() -> None:
    """Of four that are merged one by one, four versions are a round."""
    learners = ("a1", "a2", "a3", "a4")
    world = RoundWorld(*learners, "late", policy=Policy(max_staleness=1))
    for learner in learners:
        world.accept(learner)
        world.close_and_commit(closed(world, *learners))
    assert world.state.fragments["a"].version == 4
    world.accept("late", base=0)  # four versions, and one round


def test_an_outlier_alone_in_its_round_is_named_without_a_close() -> None:
    world = RoundWorld("eu")
    world.accept("eu")
    world.close_and_commit(closed(world, "eu"))
    bad = world.accept("eu", norm=1e6)
    (item,) = RoundEngine().decide(world.state, view("eu"), 0.0).items
    assert isinstance(item, FateItem)
    assert [one.delta for one in item.decided] == [bad]
    world.append(item)
    assert world.state.deltas[bad].fate is Fate.QUARANTINED


def test_the_replica_that_closed_merges_at_once_and_another_after_a_term() -> None:
    world = RoundWorld("eu")
    world.accept("eu")
    mine, other = RoundEngine(), RoundEngine()
    (item,) = mine.decide(world.state, view("eu"), 0.0).items
    assert isinstance(item, ClosedItem)
    world.append(item)
    mine.adopt_close(item)
    key = MergeKey("a", 1, 0)
    assert mine.decide(world.state, view("eu"), 0.0).merges == (key,)
    assert mine.decide(world.state, view("eu"), 0.0).merges == ()  # named once
    waiting = other.decide(world.state, view("eu"), 5.0)
    assert waiting.merges == ()
    assert waiting.wake_at_s == pytest.approx(20.0)
    assert other.decide(world.state, view("eu"), 20.0).merges == (key,)


@pytest.mark.parametrize(("merge_s", "patience_s"), [(0.0, 3.0), (0.5, 5.0), (2.0, 11.0), (60.0, 15.0)])
def test_a_merge_is_taken_over_once_it_takes_much_longer_than_the_last(merge_s: float, patience_s: float) -> None:
    world = RoundWorld("eu")
    mine, other = RoundEngine(), RoundEngine()
    for at_s in (0.0, 100.0):
        world.accept("eu")
        (item,) = mine.decide(world.state, view("eu"), at_s).items
        assert isinstance(item, ClosedItem)
        world.append(item)
        waiting = other.decide(world.state, view("eu"), at_s)
        if at_s == 0.0:
            world.commit()
            for engine in (mine, other):
                engine.decide(world.state, view("eu"), merge_s)
    assert waiting.wake_at_s == pytest.approx(100.0 + patience_s)


def test_a_merge_of_ones_own_is_timed_to_its_commit() -> None:
    world = RoundWorld("eu")
    engine, other = RoundEngine(), RoundEngine()
    world.accept("eu")
    (item,) = engine.decide(world.state, view("eu"), 0.0).items
    assert isinstance(item, ClosedItem)
    world.append(item)
    engine.adopt_close(item)
    (key,) = engine.decide(world.state, view("eu"), 0.0).merges
    world.commit()
    engine.merge_ended(key, 1.0)
    engine.decide(world.state, view("eu"), 1.5)
    world.accept("eu")
    (item,) = other.decide(world.state, view("eu"), 100.0).items
    assert isinstance(item, ClosedItem)
    world.append(item)
    assert engine.decide(world.state, view("eu"), 100.0).wake_at_s == pytest.approx(100.0 + 3.0 + 4 * 1.5)


def test_a_replica_whose_close_came_second_leaves_the_merge_to_the_first() -> None:
    world = RoundWorld("eu")
    world.accept("eu")
    first, second = RoundEngine(), RoundEngine()
    (item,) = first.decide(world.state, view("eu"), 0.0).items
    assert second.decide(world.state, view("eu"), 0.0).items == (item,)
    world.append(item)
    assert second.decide(world.state, view("eu"), 0.0).merges == ()


def test_a_failed_merge_is_due_again_after_a_term() -> None:
    world = RoundWorld("eu")
    world.accept("eu")
    engine = RoundEngine()
    (item,) = engine.decide(world.state, view("eu"), 0.0).items
    assert isinstance(item, ClosedItem)
    world.append(item)
    engine.adopt_close(item)
    (key,) = engine.decide(world.state, view("eu"), 0.0).merges
    engine.merge_ended(key, 1.0)
    assert engine.decide(world.state, view("eu"), 2.0).merges == ()
    assert engine.decide(world.state, view("eu"), 16.0).merges == (key,)


def test_while_a_set_is_frozen_its_fragment_closes_no_other() -> None:
    world = RoundWorld("eu", "us")
    world.accept("eu")
    world.append(*[closed(world, "eu", "us")])
    world.accept("us", steps=48)
    decisions = RoundEngine().decide(world.state, view("eu", "us"), 1e6)
    assert decisions.items == ()


def test_closing_a_run_merges_what_is_pending_and_then_ends_it() -> None:
    world = RoundWorld("eu", "us", policy=Policy(quorum_count=2))
    delta = world.accept("eu", steps=1)
    world.append(StatusItem(RunStatus.CLOSING))
    engine = RoundEngine()
    (close,) = engine.decide(world.state, view("eu", "us"), 0.0).items
    assert world.close_and_commit(close).participation == pytest.approx(1 / 2)  # one of two
    assert world.state.step_count == pytest.approx(1 / 2)
    assert world.state.deltas[delta].fate is Fate.MERGED
    (end,) = engine.decide(world.state, view("eu", "us"), 0.0).items
    world.append(end)
    assert world.state.status is RunStatus.CLOSED


def test_a_draining_replica_closes_nothing() -> None:
    world = RoundWorld("eu")
    world.accept("eu")
    assert RoundEngine().decide(world.state, view("eu"), 0.0, may_close=False).items == ()


def test_a_frozen_set_keeps_the_policy_that_it_was_closed_under() -> None:
    world = RoundWorld("eu")
    world.accept("eu")
    world.append(closed(world, "eu"))
    before = world.state.policy
    world.append(PolicyItem("e" * 32, Policy(inner_step_count=7)))
    assert world.state.fragments["a"].closing_policy == before != world.state.policy


def test_a_draft_has_nothing_to_decide() -> None:
    world = RoundWorld("eu")
    draft = RunState(world.spec)
    assert RoundEngine().decide(draft, view("eu"), 0.0).items == ()
