"""When rounds open and close, and who merges them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from skerry.wire.policy import Policy
from skerry_syncer.merge.merger import UPDATE_OBJECT_SPANS
from skerry_syncer.rounds.engine import RoundEngine
from skerry_syncer.rounds.membership import MembershipView
from skerry_syncer.run.lifecycle import MAX_FRAGMENT_NUMEL, MAX_TENSOR_COUNT
from skerry_syncer.run.push import SUGGESTED_PART_BYTES
from skerry_syncer.store.log.entries import (
    AcceptedItem,
    ClosedItem,
    Decided,
    Fate,
    FateItem,
    Item,
    LeftItem,
    ObjectRef,
    RunStatus,
    SessionItem,
    StatusItem,
    canonical_json,
    item_to_json,
)
from skerry_syncer.store.log.run_log import MAX_APPEND_BYTES
from tests.support.history import ejection
from tests.unit.syncer.rounds.round_world import SETTLED_S, RoundWorld, is_closed, learner, view


def test_a_round_closes_at_once_when_every_live_learner_is_in_it() -> None:
    world = RoundWorld("eu", "us")
    first, second = world.accept("eu"), world.accept("us", steps=3)
    (item,) = RoundEngine().decide(world.state, view("eu", "us"), 0.0).items
    assert isinstance(item, ClosedItem)
    assert [member.delta for member in item.members] == [first, second]
    assert item.participation == 1.0
    assert RoundEngine().decide(world.state, view("eu", "us"), 0.0, may_close=False).items == ()  # it drains


@pytest.mark.parametrize(
    ("policy", "live", "age_s", "grace_s"),
    [
        # gamma * tau * xi_step = 0.5 * 12 * 0.1 s is above 1.5 steps, which therefore bound the grace.
        pytest.param(Policy(), ("eu", "us"), SETTLED_S, 0.15, id="a missing learner is waited for"),
        pytest.param(Policy(), ("eu",), 1.0, 0.6, id="to a young view the first one back is not everybody"),
        pytest.param(Policy(delay_step_count=0), ("eu", "us"), SETTLED_S, 0.0, id="without slack nobody is waited for"),
    ],
)
def test_a_round_waits_for_no_longer_than_its_grace(
    policy: Policy, live: Sequence[str], age_s: float, grace_s: float
) -> None:
    world, engine = RoundWorld("eu", "us", policy=policy), RoundEngine()
    world.accept("eu")
    decisions = engine.decide(world.state, view(*live, age_s=age_s), 10.0)
    assert (decisions.wake_at_s or 10.0) == pytest.approx(10.0 + grace_s)
    assert bool(decisions.items) is not bool(decisions.wake_at_s)
    assert decisions.items or engine.decide(world.state, view(*live, age_s=age_s), 10.0 + grace_s).items


def test_a_round_does_not_close_below_its_quorum() -> None:
    world = RoundWorld("eu", "us", policy=Policy(quorum_count=2))
    world.accept("eu")
    engine = RoundEngine()
    decisions = engine.decide(world.state, view("eu"), 0.0)
    assert decisions.items == ()
    assert decisions.wake_at_s is None
    world.accept("us", steps=1)
    assert len(engine.decide(world.state, view("eu", "us"), 99.0).items) == 1


def test_a_delta_of_fewer_than_h_steps_opens_a_round_once_its_learner_has_trained_h_steps_more() -> None:
    world = RoundWorld("eu")
    world.accept("eu", steps=23, last_step=29)
    assert not is_closed(world, "eu", step_count=52)
    assert is_closed(world, "eu", step_count=53)


def test_a_short_delta_opens_a_round_when_its_learner_trains_no_more() -> None:
    world = RoundWorld("eu")
    world.accept("eu", steps=5)
    opened = {}
    for is_live in (True, False):
        seen = MembershipView({"eu": learner(is_live=is_live, step_count=8, is_ending=True)}, SETTLED_S)
        opened[is_live] = RoundEngine().decide(world.state, seen, 0.0).open_rounds
    assert opened == {True: (("a", 1),), False: ()}, "it may be gone"
    assert not is_closed(world)
    world.add(LeftItem("eu", "session-eu"))
    assert is_closed(world)


def test_a_short_delta_of_a_learner_that_flushes_opens_a_round_only_if_it_keeps_later_steps_back() -> None:
    world = RoundWorld("eu")
    world.accept("eu", steps=5, last_step=8)
    assert not is_closed(world, "eu", step_count=8, is_flushing=True)
    assert not is_closed(world, "eu", step_count=9)
    assert is_closed(world, "eu", step_count=9, is_flushing=True)


@pytest.mark.long
def test_a_set_whose_commit_would_not_fit_one_entry_is_merged_in_several_rounds() -> None:
    learners = [f"l{index:02}" for index in range(16)]
    world = RoundWorld(*learners, tensor_count=MAX_TENSOR_COUNT)
    waiting = [world.accept(name) for name in learners]
    update = _refs("updates/a/1-" + "0" * 32, MAX_FRAGMENT_NUMEL, UPDATE_OBJECT_SPANS * 2**20)
    engine, merged = RoundEngine(), list[str]()
    for turn in range(4):  # the second round waits for its grace, since not all are in it
        for item in engine.decide(world.state, view(*learners), 1000.0 * turn).items:
            assert isinstance(item, ClosedItem)
            world.add(item)
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
        close = world.closed("eu", "us")
        kept = tuple(member for member in close.members if member.delta != late)
        world.close_and_commit(ClosedItem("a", fragment.version + 1, 0, kept, 1.0, (), 24.0))
    world.accept("eu")
    close = world.closed("eu", "us")
    assert [(decided.delta, decided.fate) for decided in close.decided] == [(late, Fate.EXPIRED)]
    assert late not in [member.delta for member in close.members]


def froze(world: RoundWorld, engine: RoundEngine, now_s: float) -> ClosedItem:
    """Has the engine close a round of the learner `eu`, and tells it that the log took the close."""
    world.accept("eu")
    (item,) = engine.decide(world.state, view("eu"), now_s).items
    assert isinstance(item, ClosedItem)
    engine.appended(world.add(item))
    return item


def test_the_replica_whose_close_the_log_took_merges_at_once_and_another_after_a_term() -> None:
    world = RoundWorld("eu")
    mine, other = RoundEngine(), RoundEngine()
    item = froze(world, mine, 0.0)
    other.appended(world.add(item))  # the same close, too late
    assert mine.decide(world.state, view("eu"), 0.0).merges == (item,)
    assert mine.decide(world.state, view("eu"), 0.0).merges == ()  # named once
    waiting = other.decide(world.state, view("eu"), 5.0)
    assert (waiting.merges, waiting.wake_at_s) == ((), 20.0)
    assert other.decide(world.state, view("eu"), 20.0).merges == (item,)


@pytest.mark.parametrize(("merge_s", "patience_s"), [(0.0, 3.0), (0.5, 5.0), (2.0, 11.0), (60.0, 15.0)])
def test_a_merge_is_taken_over_once_it_takes_much_longer_than_the_last(merge_s: float, patience_s: float) -> None:
    world = RoundWorld("eu")
    first, second, watching = RoundEngine(), RoundEngine(), RoundEngine()
    item = froze(world, first, 0.0)
    for engine in (first, watching):
        engine.decide(world.state, view("eu"), 0.0)
    world.commit()
    first.merge_ended(item, merge_s / 2)  # before it hears of its own commit
    for engine in (first, watching):
        engine.decide(world.state, view("eu"), merge_s)
    froze(world, second, 100.0)
    for engine in (first, watching):
        assert engine.decide(world.state, view("eu"), 100.0).wake_at_s == pytest.approx(100.0 + patience_s)


def test_a_failed_merge_is_due_again_after_a_term() -> None:
    world, engine = RoundWorld("eu"), RoundEngine()
    item = froze(world, engine, 0.0)
    assert engine.decide(world.state, view("eu"), 0.0).merges == (item,)
    engine.merge_ended(item, 1.0)
    assert engine.decide(world.state, view("eu"), 2.0).merges == ()
    assert engine.decide(world.state, view("eu"), 16.0).merges == (item,)


def test_while_a_set_is_frozen_its_fragment_closes_no_other() -> None:
    world = RoundWorld("eu", "us")
    world.accept("eu")
    world.add(*[world.closed("eu", "us")])
    world.accept("us", steps=48)
    decisions = RoundEngine().decide(world.state, view("eu", "us"), 1e6)
    assert decisions.items == ()


def test_closing_a_run_merges_what_is_pending_and_then_ends_it() -> None:
    world = RoundWorld("eu", "us", policy=Policy(quorum_count=2))
    delta = world.accept("eu", steps=1)
    world.add(StatusItem(RunStatus.CLOSING))
    engine = RoundEngine()
    (close,) = engine.decide(world.state, view("eu", "us"), 0.0).items
    assert world.close_and_commit(close).participation == pytest.approx(1 / 2)  # one of two
    assert world.state.step_count == pytest.approx(1 / 2)
    assert world.state.deltas[delta].fate is Fate.MERGED
    (end,) = engine.decide(world.state, view("eu", "us"), 0.0).items
    world.add(end)
    assert world.state.status is RunStatus.CLOSED


def test_a_round_that_waited_for_ever_leaves_later_ones_their_grace() -> None:
    """A learner that leaves a short delta behind opens a round, which closes when the others are back, hours later."""
    world, engine = RoundWorld("eu", "us", policy=Policy(quorum_count=2)), RoundEngine()
    world.accept("eu", steps=5)
    ending = view("eu", step_count=8, is_ending=True)
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
    assert engine.grace_s(world.state.policy, both, ["eu", "us"]) > 0


def test_a_round_whose_deltas_were_given_up_leaves_the_next_its_grace() -> None:
    world, engine = RoundWorld("eu", "us"), RoundEngine()
    bad = world.accept("eu")
    assert engine.decide(world.state, view("eu", "us"), 0.0).items == ()
    world.add(FateItem((Decided(bad, Fate.EXPIRED, "the run was rolled back"),)))
    assert engine.decide(world.state, view("eu", "us"), 5.0).items == ()
    world.accept("us")
    assert engine.decide(world.state, view("eu", "us"), 10.0).items == ()


def test_lateness_that_was_seen_lengthens_the_grace_up_to_its_bound() -> None:
    policy = Policy(delay_step_count=1000)
    world, engine, now_s = RoundWorld("eu", "us", policy=policy), RoundEngine(), 0.0
    short_s = engine.grace_s(policy, view("eu", "us"), {"eu", "us"})
    for _ in range(3):
        world.accept("eu")
        engine.decide(world.state, view("eu", "us"), now_s)
        world.accept("us", steps=20)
        (item,) = engine.decide(world.state, view("eu", "us"), now_s + 0.1).items
        world.close_and_commit(item)
        now_s += 1
    assert engine.grace_s(policy, view("eu", "us"), {"eu", "us"}) == pytest.approx(short_s + 2 * 0.1)


def test_the_grace_covers_a_learner_twice_as_slow_and_no_step_that_nobody_waits_for() -> None:
    times_s = {"eu": 0.1, "twice": 0.2, "ten": 1.0}
    seen = MembershipView({name: learner(step_time_s=time_s) for name, time_s in times_s.items()}, SETTLED_S)
    assert RoundEngine().grace_s(Policy(), seen, {"eu", "twice"}) == pytest.approx(1.5 * 0.2)


def test_an_early_delta_says_nothing_of_lateness_and_lets_its_round_close_at_once() -> None:
    world, engine = RoundWorld("eu", "slow"), RoundEngine()
    before_s = engine.grace_s(world.state.policy, view("eu", "slow"), {"eu"})
    for number in range(4):
        world.accept("slow", steps=8)
        assert engine.decide(world.state, view("eu", "slow", step_count=0), 10.0 * number).items == ()
        world.accept("eu")
        (item,) = engine.decide(world.state, view("eu", "slow"), 10.0 * number + 5).items
        world.close_and_commit(item)
        engine.decide(world.state, view("eu", "slow"), 10.0 * number + 5)
    assert engine.grace_s(world.state.policy, view("eu", "slow"), {"eu"}) == pytest.approx(before_s)


def test_pace_comes_from_accepted_deltas_and_not_from_reports() -> None:
    world, engine = RoundWorld("eu", "us", "ap", policy=Policy(quorum_count=3)), RoundEngine()
    true_s = {"eu": 1.0, "us": 1.0, "ap": 1e-9}
    reported = MembershipView({name: learner(step_time_s=step_s) for name, step_s in true_s.items()}, SETTLED_S)
    for turn in (1, 2):
        for name in true_s:
            world.accept(name, last_step=24 * turn)
        (item,) = engine.decide(world.state, reported, 24.0 * turn).items
        world.close_and_commit(item)
        engine.decide(world.state, reported, 24.0 * turn)
    assert engine.grace_s(world.state.policy, reported, ["ap"]) == pytest.approx(1.5)


def test_the_steps_of_an_outage_that_come_at_once_do_not_shorten_the_grace() -> None:
    world, engine, seen = RoundWorld("eu", "us"), RoundEngine(), view("eu", "us", step_time_s=1.0)
    for now_s, last_step in ((0.0, 24), (1.0, 1824)):
        world.accept("eu", last_step=last_step)
        world.accept("us", last_step=last_step)
        (item,) = engine.decide(world.state, seen, now_s).items
        world.close_and_commit(item)
        engine.decide(world.state, seen, now_s)
    assert engine.grace_s(world.state.policy, seen, ["eu", "us"]) == pytest.approx(1.5)


def test_the_time_between_two_processes_of_a_learner_is_no_step_time() -> None:
    world, engine = RoundWorld("eu", "us"), RoundEngine()
    seen = view("eu", "us", step_time_s=1.0)
    world.accept("eu", last_step=24)
    (item,) = engine.decide(world.state, view("eu", step_time_s=1.0), 0.0).items
    world.close_and_commit(item)
    world.add(SessionItem("eu", "next", "here"))
    world.accept("eu", session="next", last_step=25)
    engine.decide(world.state, seen, 1000.0)
    assert engine.grace_s(world.state.policy, seen, ["eu"]) == pytest.approx(1.5)


def test_a_round_closes_without_the_learner_that_is_ejected_while_it_is_waited_for() -> None:
    world, engine = RoundWorld("eu", "us", "ap"), RoundEngine()
    for name in ("eu", "ap"):
        world.accept(name)
    assert engine.decide(world.state, view("eu", "us", "ap"), 0.0).items == ()
    world.admit(ejection("e1", "us"))
    (item,) = engine.decide(world.state, view("eu", "us", "ap"), 0.001).items
    assert isinstance(item, ClosedItem)
    assert len(item.members) == 2


def test_a_set_that_an_ejection_has_broken_up_closes_again_without_it_and_is_merged() -> None:
    world, engine = RoundWorld("eu", "us"), RoundEngine()
    theirs, ours = world.accept("us"), world.accept("eu")
    engine.appended(world.add(*engine.decide(world.state, view("eu", "us"), 0.0).items))
    (voided,) = engine.decide(world.state, view("eu", "us"), 0.0).merges
    assert [member.delta for member in voided.members] == [theirs, ours]
    world.admit(ejection("e1", "us"))
    engine.appended(world.add(*engine.decide(world.state, view("eu", "us"), 1.0).items))
    (again,) = engine.decide(world.state, view("eu", "us"), 1.0).merges
    assert (again.version, again.attempt) == (voided.version, 1)
    assert [member.delta for member in again.members] == [ours]
