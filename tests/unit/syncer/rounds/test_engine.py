"""When rounds open and close, with which deltas, weights and participation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

from skerry.wire.policy import Policy
from skerry_syncer.merge.merger import UPDATE_OBJECT_SPANS
from skerry_syncer.rounds.closing import references
from skerry_syncer.rounds.engine import RoundEngine
from skerry_syncer.rounds.membership import LearnerView, MembershipView
from skerry_syncer.rounds.timing import MergeKey
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
    PolicyItem,
    RunStatus,
    SessionItem,
    StatusItem,
    canonical_json,
    item_to_json,
)
from skerry_syncer.store.log.run_log import MAX_APPEND_BYTES
from skerry_syncer.store.log.state import LearnerState, RunState
from tests.unit.syncer.rounds.round_world import SETTLED_S, RoundWorld, view


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


@pytest.mark.parametrize(("steps", "weight"), [(0, 0.0), (12, 0.25), (24, 1.0), (48, 1.0)])
def test_a_newcomer_counts_with_what_its_reported_steps_would_bring(steps: int, weight: float) -> None:
    world = RoundWorld("eu", "new")
    world.accept("eu")
    seen = MembershipView({"eu": LearnerView(True, 24, 0.1), "new": LearnerView(True, steps, 0.1)}, 1000.0)
    engine = RoundEngine()
    engine.decide(world.state, seen, 0.0)
    (item,) = engine.decide(world.state, seen, 1e6).items
    assert isinstance(item, ClosedItem)
    assert item.participation == pytest.approx(1 / (1 + weight))


def test_while_the_view_is_young_the_first_learner_back_is_not_everybody() -> None:
    world = RoundWorld("eu", "us")
    world.accept("eu")
    engine = RoundEngine()
    young = view("eu", age_s=1.0)
    decisions = engine.decide(world.state, young, 0.0)
    assert decisions.items == ()
    assert decisions.wake_at_s == pytest.approx(0.15)


def test_a_round_whose_deltas_were_given_up_leaves_the_next_its_grace() -> None:
    world = RoundWorld("eu", "us")
    engine = RoundEngine()
    bad = world.accept("eu")
    assert engine.decide(world.state, view("eu", "us"), 0.0).items == ()
    world.append(FateItem((Decided(bad, Fate.EXPIRED, "the run was rolled back"),)))
    assert engine.decide(world.state, view("eu", "us"), 5.0).items == ()
    world.accept("us")
    assert engine.decide(world.state, view("eu", "us"), 10.0).items == ()


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


def test_weights_are_tokens_with_a_cap() -> None:
    world = RoundWorld("eu", "us")
    world.accept("eu", steps=24, tokens=2400)
    world.accept("us", steps=96, tokens=9600)  # counts as 48 steps, twice H
    (item,) = RoundEngine().decide(world.state, view("eu", "us"), 0.0).items
    assert isinstance(item, ClosedItem)
    assert [member.weight for member in item.members] == [2400, 4800]


def closed(world: RoundWorld, *live: str, engine: RoundEngine | None = None) -> ClosedItem:
    """Returns the close that the engine comes to once any grace is over."""
    engine = engine or RoundEngine()
    decisions = engine.decide(world.state, view(*live), 0.0)
    if not decisions.items:
        decisions = engine.decide(world.state, view(*live), 1e6)
    (item,) = decisions.items
    assert isinstance(item, ClosedItem)
    return item


def test_a_stale_delta_is_damped_in_weight_and_in_the_step() -> None:
    world = RoundWorld("eu", "us")
    for _ in range(3):
        world.accept("eu")
        world.close_and_commit(closed(world, "eu"))
    world.append(LeftItem("eu", "session-eu"))
    world.accept("us", base=0)
    item = closed(world, "us")
    assert item.members[0].staleness == 3
    assert item.members[0].weight == pytest.approx(2400 / 2)  # (1 + 3)^-0.5
    assert item.participation == pytest.approx(0.5)


def test_a_version_that_only_some_made_makes_nobodys_answer_stale() -> None:
    """Of four that are merged one by one, each makes a version: a quarter of a round, while deltas are on their way."""
    world = RoundWorld("a1", "a2", "a3", "a4")
    for learner in ("a1", "a2"):
        world.accept(learner)
        world.close_and_commit(closed(world, "a1", "a2", "a3", "a4"))
    world.accept("a3", base=1)
    item = closed(world, "a1", "a2", "a3", "a4")
    assert item.members[0].staleness == 1
    assert item.members[0].weight == 2400
    assert item.participation == pytest.approx(0.25)


def test_a_round_that_few_take_part_in_is_scaled_by_their_share() -> None:
    world = RoundWorld("a1", "a2", "a3", "a4")
    world.accept("a1")
    assert closed(world, "a1", "a2", "a3", "a4").participation == pytest.approx(0.25)


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


def test_an_outlier_is_quarantined_by_name_and_the_rest_is_merged() -> None:
    world = RoundWorld("eu", "us", "ap")
    good = [world.accept("eu"), world.accept("us", norm=2.0)]
    bad = world.accept("ap", norm=1e4)
    close = closed(world, "eu", "us", "ap")
    assert [member.delta for member in close.members] == good
    assert [(one.delta, one.fate) for one in close.decided] == [(bad, Fate.QUARANTINED)]


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


def test_what_comes_again_as_large_from_a_learner_alone_is_training() -> None:
    """Nobody else bears it out, and the same steps from the same weights lead there for ever."""
    world = RoundWorld("eu")
    world.accept("eu")
    world.close_and_commit(closed(world, "eu"))
    for norm in (1e4, 1e8):  # the second is as far from the first as that from what was merged
        world.accept("eu", norm=norm)
        (item,) = RoundEngine().decide(world.state, view("eu"), 0.0).items
        assert isinstance(item, FateItem)
        world.append(item)
    world.accept("eu", norm=3e7)
    assert len(closed(world, "eu").members) == 1


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
    "schedules that end at 0, and go on there": [
        Training(usual, step_count=1800),
        Training(usual, step_count=1800),
        Training(usual, slowness=3),
    ],
    "warm restarts": [Training(restarts), Training(restarts), Training(restarts, slowness=3)],
    "warm restarts after everybody else left": [
        Training(restarts, step_count=240),
        Training(restarts, step_count=1200),
    ],
    "a late joiner at full rate": [
        Training(usual),
        Training(usual),
        Training(lambda _: 1.0, begin=560, step_count=300),
    ],
    "a late joiner that warms up in no time": [
        Training(lambda step: min(1, step / 400)),
        Training(lambda step: min(1, step / 400)),
        Training(lambda _: 1.0, begin=480, step_count=300),
    ],
    "one fine-tuner among others": [Training(usual), Training(usual), Training(lambda _: 0.001)],
}
CLIPPED = {
    "a tenfold rate": [Training(usual), Training(usual), Training(lambda step: 10 * usual(step))],
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
        view = {name: LearnerView(True, steps[name], 0.1, is_flushing=name in left) for name in working}
        engine, members = RoundEngine(), MembershipView(view, SETTLED_S)
        decisions = [engine.decide(world.state, members, now_s).items for now_s in (0.0, 1e6)]
        close = next(decided[0] for decided in decisions if decided)
        world.append(close)
        if isinstance(close, ClosedItem):
            world.commit()
        for name in left:
            world.append(LeftItem(name, f"session-{name}"))
            del working[name]
    assert not working
    return world.state, largest


@pytest.mark.parametrize("trainings", (IN_FULL | CLIPPED).values(), ids=IN_FULL | CLIPPED)
def test_no_delta_of_an_honest_learner_is_refused(trainings: list[Training]) -> None:
    state, _ = trained(trainings)
    assert {delta.reason for delta in state.deltas.values() if delta.fate is not Fate.MERGED} == set()


@pytest.mark.parametrize("trainings", IN_FULL.values(), ids=IN_FULL)
def test_the_work_of_learners_whose_rates_fall_at_other_times_counts_in_full(trainings: list[Training]) -> None:
    _, largest = trained(trainings)
    assert largest < 2.0


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
            world.close_and_commit(closed(world, *"abc"))
        assert ratios[2] > 20
        assert max(ratios[:2]) <= 1


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


def test_a_frozen_set_keeps_the_policy_that_it_was_closed_under() -> None:
    world = RoundWorld("eu")
    world.accept("eu")
    world.append(closed(world, "eu"))
    before = world.state.policy
    world.append(PolicyItem("e" * 32, Policy(inner_step_count=7)))
    assert world.state.fragments["a"].closing_policy == before != world.state.policy


def test_a_runs_progress_counts_joint_rounds_once_and_lone_ones_by_their_share() -> None:
    joint = RoundWorld("eu", "us")
    joint.accept("eu", steps=24)
    joint.accept("us", steps=8)
    joint.close_and_commit(closed(joint, "eu", "us"))
    assert joint.state.step_count == 24

    apart = RoundWorld("eu", "us")
    for learner in ("eu", "us"):
        apart.accept(learner, steps=24)
        apart.close_and_commit(closed(apart, "eu", "us"))
    assert apart.state.step_count == pytest.approx(24)


def test_a_round_is_as_long_as_the_delta_that_holds_its_median_token() -> None:
    """A third learner, three times as fast with a quarter of the batch, leaves the run's clock as it is."""
    world = RoundWorld("a1", "a2", "fast")
    world.accept("a1", steps=8, tokens=800)
    world.accept("a2", steps=8, tokens=800)
    world.accept("fast", steps=24, tokens=600)
    world.close_and_commit(closed(world, "a1", "a2", "fast"))
    assert world.state.step_count == 8


def test_an_outage_of_everybody_takes_the_run_as_far_as_they_trained() -> None:
    world = RoundWorld("eu", "us")
    world.accept("eu", steps=1000)
    world.accept("us", steps=900)
    world.close_and_commit(closed(world, "eu", "us"))
    assert world.state.step_count == 900


def test_rounds_that_last_longer_than_h_for_everybody_count_in_full() -> None:
    """A syncer slower than H steps holds up all, and each time anew."""
    world = RoundWorld("eu", "us")
    for _ in range(3):
        world.accept("eu", steps=60)
        world.accept("us", steps=60)
        world.close_and_commit(closed(world, "eu", "us"))
    assert world.state.step_count == 180


def test_what_a_late_learner_brings_when_the_others_have_left_is_no_outage() -> None:
    world = RoundWorld("eu", "late")
    for base in (0, None, None, 1):  # of the late one's delta
        world.accept("eu")
        if base is not None:
            world.accept("late", base=base)
        world.close_and_commit(closed(world, "eu"))
    world.append(LeftItem("eu", "session-eu"))
    before = world.state.step_count
    world.accept("late", steps=68)
    assert world.close_and_commit(closed(world, "late")).participation == 1.0
    assert world.state.step_count - before == pytest.approx(24)


def test_one_learner_that_returns_takes_the_run_no_further_than_a_round() -> None:
    world = RoundWorld("eu", "us")
    world.accept("eu", steps=200)
    world.accept("us", steps=24)
    world.close_and_commit(closed(world, "eu", "us"))
    assert world.state.step_count == 24


def test_a_silent_learner_damps_the_others_for_a_round_or_two_whatever_its_lease_says() -> None:
    world = RoundWorld("eu", "us")
    shares = []
    for number in range(6):
        world.accept("eu")
        if number == 0:
            world.accept("us")
        shares.append(world.close_and_commit(closed(world, "eu", "us")).participation)
    assert shares == pytest.approx([1.0, 0.5, 0.5, 0.5, 1.0, 1.0])


def test_learners_one_contributor_in_turn_each_count_their_share() -> None:
    world = RoundWorld("a1", "a2", "a3", "a4")
    for _ in range(3):
        for learner in ("a1", "a2", "a3", "a4"):
            world.accept(learner)
            close = world.close_and_commit(closed(world, "a1", "a2", "a3", "a4"))
            assert close.participation == pytest.approx(0.25)
    assert world.state.step_count == pytest.approx(3 * 24)


def test_a_newcomer_is_expected_to_bring_what_the_others_do() -> None:
    world = RoundWorld("eu", "new")
    world.accept("eu")
    assert closed(world, "eu", "new").participation == pytest.approx(1 / 2)


def test_nobody_waits_for_a_live_learner_that_missed_two_closes() -> None:
    world = RoundWorld("eu", "us")
    world.accept("us")
    waits = []
    for _ in range(5):
        world.accept("eu")
        waits.append(not RoundEngine().decide(world.state, view("eu", "us"), 0.0).items)
        world.close_and_commit(closed(world, "eu", "us"))
    assert waits == [False, True, True, False, False]


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


def test_a_draft_has_nothing_to_decide() -> None:
    world = RoundWorld("eu")
    draft = RunState(world.spec)
    assert RoundEngine().decide(draft, view("eu"), 0.0).items == ()
