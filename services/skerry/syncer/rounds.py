"""Decides when rounds close, with which deltas, weights and participation, and which closes this replica merges.

Pure decisions: no I/O, no clock, no randomness; time comes in as an argument. What is decided is proposed to the
log, and only the fold makes it true, so any number of replicas may run an engine each over the same log.

A round of a fragment is *open* when a pending delta holds at least H steps, or its learner has trained H steps since
it took the delta (so that a late, short delta whose learner is alone now can't wait for ever). An open round closes

    at once        when every expected learner is in it: live leases, and the contributors of the last closes until
                   they leave or miss two;
    after a grace  from the moment that K learners are in it: min(gamma * slack, about one step of the slowest
                   learner and the usual lateness), slack = tau * xi_step - (xi_quorum + xi_sync); negative: at once.

While a replica's view of the leases is younger than a term, it can't know who is missing, and only quorum and grace
close a round.

Source: Decoupled DiLoCo (arXiv 2604.21428), minimum quorum and adaptive grace window; factors and bounds are this
project's.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from skerry.store.entries import AcceptedItem, ClosedItem, Decided, Fate, FateItem, Item, Member, RunStatus, StatusItem
from skerry.store.fold import RunState
from skerry.store.round_length import delta_weight
from skerry.store.run_state import REMEMBERED_CLOSES, DeltaState, FragmentState
from skerry.wire.policy import Policy

# Weight of a new observation in the moving averages: five rounds back counts a third.
EMA_FACTOR: Final = 0.2
# Step time assumed before any learner has reported one.
UNKNOWN_STEP_S: Final = 0.5
# The grace window covers the step that a learner is in when it hears of the round, and half of one for its encoding.
GRACE_STEPS: Final = 1.5
# Times H that a run goes on before a learner that brings nothing no longer counts as working.
ABSENT_AFTER: Final = 1.5


@dataclass(frozen=True)
class LearnerView:
    """A learner as this replica sees it through leases: advice, never truth."""

    is_live: bool
    step_count: int = 0  # of its last report
    step_time_s: float | None = None  # moving average that it reports


@dataclass(frozen=True)
class MembershipView:
    """Who seems to be there."""

    learners: Mapping[str, LearnerView]
    age_s: float  # how long this replica has been watching the leases

    def is_settled(self, policy: Policy) -> bool:
        """Whether the view is old enough that an absent learner is known to be absent."""
        return self.age_s >= policy.lease_term_s


@dataclass(frozen=True)
class MergeKey:
    """Names one frozen set."""

    fragment: str
    version: int
    attempt: int


@dataclass(frozen=True)
class Decisions:
    """What to do now: items to propose to the log, merges to start, and when to ask again if nothing happens before."""

    items: tuple[Item, ...]
    merges: tuple[MergeKey, ...]
    wake_at_s: float | None  # on the clock of `now_s`


@dataclass
class _RoundTiming:
    """What one replica has seen of one fragment's current round, on its own monotonic clock."""

    opened_at_s: float | None = None
    quorum_at_s: float | None = None
    closing_seen_at_s: float | None = None
    closing_key: MergeKey | None = None
    close_position: int = 0  # of the last close seen: a round may open, close and commit between two looks
    last_quorum_at_s: float | None = None  # of the round before: late deltas tell how long the grace should have been
    seen: set[str] = field(default_factory=set)  # pending deltas already accounted in the averages


class _Average:
    """Exponential moving average that starts at its first observation."""

    def __init__(self) -> None:
        self.value = 0.0
        self._is_empty = True

    def observe(self, value: float) -> None:
        self.value = value if self._is_empty else self.value + EMA_FACTOR * (value - self.value)
        self._is_empty = False


class RoundEngine:
    """Decides for one run on one replica; holds nothing but timings, which are lost without harm."""

    def __init__(self) -> None:
        """Starts without any timing."""
        self._timings: dict[str, _RoundTiming] = {}
        self._xi_quorum = _Average()
        self._xi_sync = _Average()
        self._xi_arrival = _Average()
        self._proposed: set[MergeKey] = set()
        self._merging: set[MergeKey] = set()

    def decide(self, state: RunState, view: MembershipView, now_s: float, *, may_close: bool = True) -> Decisions:
        """Returns what follows from the log and the view at `now_s`.

        To be called after every change of either, and at `wake_at_s`. With `may_close` false (draining) nothing new is
        closed. A merge is named once, until `merge_ended` is called for it.
        """
        items: list[Item] = []
        merges: list[MergeKey] = []
        wakes: list[float] = []
        for name in sorted(state.fragments):
            fragment = state.fragments[name]
            timing = self._timings.setdefault(name, _RoundTiming())
            self._observe(state, fragment, view, timing, now_s)
            if fragment.closing is not None:
                key, due_s = self._merge_due(state, fragment, timing, now_s)
                if key in self._merging:
                    continue
                if due_s <= now_s:
                    merges.append(key)
                else:
                    wakes.append(due_s)
            elif fragment.pending and may_close and state.status in (RunStatus.OPEN, RunStatus.CLOSING):
                item, wake_s = self._close(state, fragment, view, timing, now_s)
                if item is not None:
                    items.append(item)
                if wake_s is not None:
                    wakes.append(wake_s)
        self._merging.update(merges)
        if may_close and not items and _is_drained(state):
            items.append(StatusItem(RunStatus.CLOSED))
        return Decisions(tuple(items), tuple(merges), min(wakes, default=None))

    def merge_ended(self, key: MergeKey, now_s: float) -> None:
        """Says that this replica's merge of `key` is over; without a commit it is due again a term from now."""
        self._merging.discard(key)
        self._proposed.discard(key)
        timing = self._timings.get(key.fragment)
        if timing is not None and timing.closing_key == key:
            timing.closing_seen_at_s = now_s

    def adopt_close(self, item: ClosedItem) -> None:
        """Says that this replica proposed `item`, so that it merges the set without waiting for a term."""
        self._proposed.add(MergeKey(item.fragment, item.version, item.attempt))

    def open_rounds(self, state: RunState, view: MembershipView) -> tuple[tuple[str, int], ...]:
        """Returns (fragment, version to be made) of every open round."""
        return tuple(
            (name, fragment.version + (1 if fragment.closing is None else 2))
            for name, fragment in sorted(state.fragments.items())
            if state.status is RunStatus.OPEN and is_open(fragment, state.policy, view)
        )

    def _observe(
        self, state: RunState, fragment: FragmentState, view: MembershipView, timing: _RoundTiming, now_s: float
    ) -> None:
        """Keeps the timings and averages up with the fold."""
        key = None
        if fragment.closing is not None:
            key = MergeKey(fragment.layout.name, fragment.closing.version, fragment.closing.attempt)
        if key != timing.closing_key:
            if timing.closing_key is not None and timing.closing_seen_at_s is not None and key is None:
                self._xi_sync.observe(now_s - timing.closing_seen_at_s)
            timing.closing_key, timing.closing_seen_at_s = key, now_s
        if fragment.last_close_position != timing.close_position:
            timing.close_position = fragment.last_close_position
            timing.last_quorum_at_s = timing.quorum_at_s
            timing.opened_at_s = timing.quorum_at_s = None
        for name, delta in fragment.pending.items():
            reference_s = self._answered_quorum_s(state, fragment, delta, timing)
            if name not in timing.seen and reference_s is not None:
                self._xi_arrival.observe(min(now_s - reference_s, self._interval_s(state.policy, view)))
        timing.seen = set(fragment.pending)
        if not fragment.pending:  # closed, or what it gathered was given up: the next one has its own time
            timing.opened_at_s = timing.quorum_at_s = None
        if timing.opened_at_s is None and is_open(fragment, state.policy, view):
            timing.opened_at_s = now_s
        if timing.opened_at_s is not None and timing.quorum_at_s is None and _has_quorum(fragment, state.policy):
            timing.quorum_at_s = now_s
            self._xi_quorum.observe(now_s - timing.opened_at_s)

    @staticmethod
    def _answered_quorum_s(
        state: RunState, fragment: FragmentState, delta: DeltaState, timing: _RoundTiming
    ) -> float | None:
        """Returns when the round that a short delta answers had its quorum; None where it answers none.

        A delta of fewer than H steps answers the round that gathers, or comes late to the one before, whose version it
        does not know yet; else it is early for the next.
        """
        if delta.item.step_count >= state.policy.inner_step_count:
            return None
        if timing.quorum_at_s is not None:
            return timing.quorum_at_s
        newest = fragment.version if fragment.closing is None else fragment.closing.version
        return timing.last_quorum_at_s if delta.item.base_version < newest else None

    def _merge_due(
        self, state: RunState, fragment: FragmentState, timing: _RoundTiming, now_s: float
    ) -> tuple[MergeKey, float]:
        assert timing.closing_key is not None  # `_observe` has just set it
        assert timing.closing_seen_at_s is not None
        is_own = timing.closing_key in self._proposed
        # Another replica merges what it closed; only if no commit comes for a term is it taken for dead.
        return timing.closing_key, now_s if is_own else timing.closing_seen_at_s + state.policy.lease_term_s

    def _close(
        self, state: RunState, fragment: FragmentState, view: MembershipView, timing: _RoundTiming, now_s: float
    ) -> tuple[Item | None, float | None]:
        """Returns the item that closes the fragment's round, or when to ask again."""
        is_ending = state.status is RunStatus.CLOSING
        if not is_ending:
            if timing.opened_at_s is None or timing.quorum_at_s is None:
                return None, None
            contributors = {delta.item.learner for delta in fragment.pending.values()}
            is_complete = view.is_settled(state.policy) and expected_learners(state, fragment, view) <= contributors
            deadline_s = timing.quorum_at_s + self.grace_s(state.policy, view)
            if not is_complete and now_s < deadline_s:
                return None, deadline_s
        candidates = [self.weigh(delta, fragment, state.policy) for delta in fragment.pending.values()]
        decided = (*_expired(candidates, state.policy), *_outliers(candidates, fragment, state.policy))
        named = {one.delta for one in decided}
        members = tuple(member for _, member in candidates if member.delta not in named)
        if not members or (not is_ending and not _has_quorum(fragment, state.policy, without=named)):
            return (FateItem(decided), None) if decided else (None, None)
        item = ClosedItem(
            fragment=fragment.layout.name,
            version=fragment.version + 1,
            attempt=fragment.next_attempt,
            members=members,
            participation=participation(state, fragment, view, members),
            decided=decided,
        )
        self.adopt_close(item)
        return item, None

    @staticmethod
    def weigh(delta: DeltaState, fragment: FragmentState, policy: Policy) -> tuple[DeltaState, Member]:
        """Returns the delta with its place in a set that closes now: weight w f and staleness in versions.

        f = (1 + s)^-a counts s in rounds, that is in H steps of the run, to the nearest whole one: where learners are
        merged one by one each makes a version, and an answer that took a moment is not stale for that.
        """
        base = delta.item.base_version
        rounds = math.floor(fragment.steps_since(base, fragment.version) / policy.inner_step_count + 0.5)
        weight = _weight(delta.item, policy) * (1 + rounds) ** -policy.staleness_exponent
        return delta, Member(delta.item.delta, weight, fragment.version - base)

    def grace_s(self, policy: Policy, view: MembershipView) -> float:
        """Returns the seconds that a round waits for more deltas once its quorum is in."""
        steps_s = [v.step_time_s for v in view.learners.values() if v.is_live and v.step_time_s is not None]
        xi_step_s = statistics.median(steps_s) if steps_s else UNKNOWN_STEP_S
        slack_s = policy.tau * xi_step_s - (self._xi_quorum.value + self._xi_sync.value)
        enough_s = GRACE_STEPS * max(steps_s, default=UNKNOWN_STEP_S) + 2 * self._xi_arrival.value
        return max(0.0, min(policy.grace_factor * slack_s, enough_s))

    def _interval_s(self, policy: Policy, view: MembershipView) -> float:
        steps_s = [v.step_time_s for v in view.learners.values() if v.is_live and v.step_time_s is not None]
        return policy.inner_step_count * (statistics.median(steps_s) if steps_s else UNKNOWN_STEP_S)


def is_open(fragment: FragmentState, policy: Policy, view: MembershipView) -> bool:
    """Whether the fragment's pending deltas make a round that may close."""
    for delta in fragment.pending.values():
        learner = view.learners.get(delta.item.learner)
        later_steps = 0 if learner is None else learner.step_count - delta.item.last_step
        if max(delta.item.step_count, later_steps) >= policy.inner_step_count:
            return True
    return False


def expected_learners(state: RunState, fragment: FragmentState, view: MembershipView) -> set[str]:
    """Returns whom a round of `fragment` waits for: who is there and has not missed the last two closes."""
    recent = set[str]().union(*fragment.contributors)
    is_early = len(fragment.close_positions) < REMEMBERED_CLOSES
    return {
        name
        for name in _present_learners(state, fragment, view)
        if is_early or name in recent or state.learners[name].attached_at > fragment.close_positions[0]
    }


def _present_learners(state: RunState, fragment: FragmentState, view: MembershipView) -> set[str]:
    live = {name for name, learner in view.learners.items() if learner.is_live}
    recent = set[str]().union(*fragment.contributors)
    return {name for name in live | recent if (known := state.learners.get(name)) is not None and not known.has_left}


def _sharing_learners(state: RunState, fragment: FragmentState, view: MembershipView) -> set[str]:
    """Returns whose share of the work a round of `fragment` lacks without them.

    A learner is taken to work until the run has gone on `ABSENT_AFTER` times H without anything of it, so that a dead
    one damps the others' steps for a round or two, and not for as long as its lease seems to live.
    """
    horizon = ABSENT_AFTER * state.policy.inner_step_count
    return {
        name
        for name in _present_learners(state, fragment, view)
        if fragment.newest.step_count
        < horizon + max(fragment.contributed_at.get(name, 0.0), state.learners[name].attached_at_step)
    }


def participation(state: RunState, fragment: FragmentState, view: MembershipView, members: Iterable[Member]) -> float:
    """Returns rho = sum(w f over contributors) / sum(expected w over working learners), above 0 and at most 1.

    A contributor is expected to bring its own undamped w; an absent learner what it brought last, or else what one of
    its pace would bring.
    """
    deltas = [(member, state.deltas[member.delta].item) for member in members]
    undamped: dict[str, float] = {}
    for _, item in deltas:
        undamped[item.learner] = undamped.get(item.learner, 0.0) + _weight(item, state.policy)
    absent = _sharing_learners(state, fragment, view) - undamped.keys()
    total = sum(undamped.values())
    for name in sorted(absent):
        known = fragment.weights.get(name)
        total += _first_weight(view, name, undamped) if known is None else known
    brought = sum(member.weight for member, _ in deltas)
    return min(1.0, brought / total) if brought > 0 and total > 0 else 1.0


def _first_weight(view: MembershipView, name: str, contributed: Mapping[str, float]) -> float:
    """Returns w of the delta that a learner of which nothing was merged yet will bring.

    Of one that is p times as fast as the contributors it holds p H steps, and so weighs p^2 times their mean. One that
    has just begun, or compiles its model still, is waited for by nobody's step.
    """
    learner = view.learners.get(name)
    if learner is not None and learner.step_count < _PACED_STEPS:
        return 0.0
    mean = statistics.fmean(contributed.values())
    times_s = [one.step_time_s for key, one in view.learners.items() if key in contributed and one.step_time_s]
    if learner is None or not learner.step_time_s or not times_s:
        return mean
    return mean * min(1.0, statistics.median(times_s) / learner.step_time_s) ** 2


# Steps after which a learner's pace can be known.
_PACED_STEPS: Final = 2


def _weight(item: AcceptedItem, policy: Policy) -> float:
    return delta_weight(
        item.step_count, item.token_count, inner_step_count=policy.inner_step_count, weight_cap=policy.weight_cap
    )


def _expired(candidates: Iterable[tuple[DeltaState, Member]], policy: Policy) -> tuple[Decided, ...]:
    return tuple(
        Decided(member.delta, Fate.EXPIRED, f"staler than the policy allows. staleness={member.staleness}")
        for _, member in candidates
        if member.staleness > policy.max_staleness
    )


def _outliers(
    candidates: list[tuple[DeltaState, Member]], fragment: FragmentState, policy: Policy
) -> tuple[Decided, ...]:
    """Names deltas whose norm a step exceeds both their peers' and their own history by the policy's ratio."""
    if policy.quarantine_ratio == 0:
        return ()
    found = []
    for delta, member in candidates:
        if member.staleness > policy.max_staleness:
            continue
        learner = delta.item.learner
        own = fragment.squared_norms.get(learner, ())
        peers = [_squared_norm_a_step(other) for other, _ in candidates if other.item.learner != learner]
        peers += [
            value for name, history in sorted(fragment.squared_norms.items()) if name != learner for value in history
        ]
        references = [statistics.median(values) for values in (own, peers) if values]
        reference = max(references, default=0.0)
        value = _squared_norm_a_step(delta)
        if reference > 0 and value > policy.quarantine_ratio**2 * reference:
            ratio = math.sqrt(value / reference)
            found.append(Decided(member.delta, Fate.QUARANTINED, f"norm is an outlier. ratio={ratio:.1f}"))
    return tuple(found)


def _squared_norm_a_step(delta: DeltaState) -> float:
    steps = max(delta.item.step_count, 1)
    return sum(delta.item.squared_norms) / (steps * steps)


def _has_quorum(fragment: FragmentState, policy: Policy, *, without: Iterable[str] = ()) -> bool:
    excluded = set(without)
    learners = {d.item.learner for name, d in fragment.pending.items() if name not in excluded}
    return len(learners) >= policy.quorum_count


def _is_drained(state: RunState) -> bool:
    return state.status is RunStatus.CLOSING and not any(f.pending or f.closing for f in state.fragments.values())
