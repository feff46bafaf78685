"""Decides when rounds close, with which deltas, weights and participation, and which closes this replica merges.

Pure decisions: no I/O, no clock, no randomness; time comes in as an argument. What is decided is proposed to the log,
and only the fold makes it true, so any number of replicas may run an engine each over the same log.

A round of a fragment is *open* when a pending delta holds at least H steps, or its learner has trained H steps since
it took the delta (so that a late, short delta whose learner is alone now can't wait for ever), trains no more, has
left, or is back with another session (its later steps can't be sent before). An open round closes

    at once        when every expected learner is in it: live leases, and the contributors of the last closes until
                   they leave or miss two;
    after a grace  from the moment that K learners are in it: min(gamma * slack, 1.5 steps of the slowest that
                   is waited for plus twice the mean lateness), slack = tau * xi_step - (xi_quorum + xi_sync);
                   negative: at once.

The replica that closed a round merges it. Another one merges it too if no commit comes within 3 s and four times what
the fragment's last merge took, at most a term; which of both commits is for the log to decide.

While a replica's view of the leases is younger than a term, it can't know which learners are missing, and only quorum
and grace close a round.

Source: Decoupled DiLoCo (arXiv 2604.21428), minimum quorum and adaptive grace window; factors and bounds are this
project's.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Final

from skerry.wire.layout import FragmentLayout
from skerry.wire.policy import Policy
from skerry_syncer.rounds.closing import bounded, closed_round, outliers, weigh
from skerry_syncer.rounds.membership import LearnerView, MembershipView, expected_learners
from skerry_syncer.store.log.entries import (
    AcceptedItem,
    ClosedItem,
    Decided,
    Fate,
    FateItem,
    Item,
    RunStatus,
    StatusItem,
)
from skerry_syncer.store.log.run_log import MAX_APPEND_BYTES
from skerry_syncer.store.log.state import DeltaState, FragmentState, Outcome, RunState

# Weight of a new observation in the moving averages: an observation five rounds ago counts for a third of it.
EMA_FACTOR: Final = 0.2
# Step time assumed before any learner has reported one.
UNKNOWN_STEP_S: Final = 0.5
# A commit has to fit one log entry: bytes of all but the names of its update, and of one number in quotes with its
# comma.
_SCALARS_BYTES: Final = MAX_APPEND_BYTES * 3 // 4
_SCALAR_BYTES: Final = 11
# The grace window covers the step that a learner is in when it hears of the round, and half of one for its encoding.
GRACE_STEPS: Final = 1.5
# A merge that another replica has closed is taken over after so many seconds, and so many times what the last one took.
TAKE_OVER_S: Final = 3.0
TAKE_OVER_FACTOR: Final = 4.0


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
    merge_ended_at_s: float | None = None  # here, without a commit
    close_position: int = -1  # of the last close seen: a round may open, close and commit between two looks
    last_quorum_at_s: float | None = None  # of the round before: late deltas tell how long the grace should have been
    seen: set[str] = field(default_factory=set)  # pending deltas already accounted in the averages
    merge_s: float = math.inf  # from the last close to its commit


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
        self._last_seen: dict[tuple[str, str], tuple[int, float]] = {}  # (learner, fragment) -> last step, and when
        self._steps_s: dict[str, float] = {}  # by learner
        self._own: set[MergeKey] = set()  # sets that an entry of this replica froze
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
        self._own.discard(key)
        timing = self._timings.get(key.fragment)
        if timing is not None and timing.closing_key == key:
            timing.merge_ended_at_s = now_s

    def appended(self, outcomes: Iterable[Outcome]) -> None:
        """Says what became of items that this replica appended."""
        for outcome in outcomes:
            if outcome.rejection is None and isinstance(outcome.item, ClosedItem):
                self.adopt_close(outcome.item)

    def adopt_close(self, item: ClosedItem) -> None:
        """Says that the log admitted `item` from this replica, which so merges the set without waiting for a term."""
        self._own.add(MergeKey(item.fragment, item.version, item.attempt))

    def open_since_s(self) -> list[float]:
        """Returns when each round that is open was first seen open here, on the clock of `now_s`."""
        return [timing.opened_at_s for timing in self._timings.values() if timing.opened_at_s is not None]

    def open_rounds(self, state: RunState, view: MembershipView) -> tuple[tuple[str, int], ...]:
        """Returns (fragment, version to be made) of every open round."""
        return tuple(
            (name, fragment.version + (1 if fragment.closing is None else 2))
            for name, fragment in sorted(state.fragments.items())
            if state.status is RunStatus.OPEN and is_open(state, fragment, view)
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
                timing.merge_s = now_s - timing.closing_seen_at_s
                self._xi_sync.observe(timing.merge_s)
            timing.closing_key, timing.closing_seen_at_s, timing.merge_ended_at_s = key, now_s, None
        if fragment.last_close_position != timing.close_position:
            timing.close_position = fragment.last_close_position
            timing.last_quorum_at_s = timing.quorum_at_s
            timing.opened_at_s = timing.quorum_at_s = None
        for name, delta in fragment.pending.items():
            if name not in timing.seen:
                self._time_steps(delta.item, now_s)
            reference_s = self._answered_quorum_s(state, fragment, delta, timing)
            if name not in timing.seen and reference_s is not None:
                self._xi_arrival.observe(min(now_s - reference_s, self._interval_s(state.policy, view)))
        timing.seen = set(fragment.pending)
        if not fragment.pending:  # closed, or what it gathered was given up: the next one has its own time
            timing.opened_at_s = timing.quorum_at_s = None
        if is_open(state, fragment, view):
            timing.opened_at_s = now_s if timing.opened_at_s is None else timing.opened_at_s
        elif timing.quorum_at_s is None:  # the learner whose end would have opened it is gone
            timing.opened_at_s = None
        if timing.opened_at_s is not None and timing.quorum_at_s is None and _has_quorum(fragment, state.policy):
            timing.quorum_at_s = now_s
            self._xi_quorum.observe(min(now_s - timing.opened_at_s, self._interval_s(state.policy, view)))

    def _time_steps(self, item: AcceptedItem, now_s: float) -> None:
        """Times a learner's steps by the arrival of its deltas of one fragment, since its reports may be wrong."""
        last_step, at_s = self._last_seen.get((item.learner, item.fragment), (item.last_step, now_s))
        self._last_seen[item.learner, item.fragment] = item.last_step, now_s
        if item.last_step > last_step:
            self._steps_s[item.learner] = (now_s - at_s) / (item.last_step - last_step)

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
        if timing.closing_key in self._own:
            return timing.closing_key, now_s
        if timing.merge_ended_at_s is not None:
            return timing.closing_key, timing.merge_ended_at_s + state.policy.lease_term_s
        # Another replica merges the sets that it closed. Without a commit it is assumed dead.
        patience_s = min(state.policy.lease_term_s, TAKE_OVER_S + TAKE_OVER_FACTOR * timing.merge_s)
        return timing.closing_key, timing.closing_seen_at_s + patience_s

    def _close(
        self, state: RunState, fragment: FragmentState, view: MembershipView, timing: _RoundTiming, now_s: float
    ) -> tuple[Item | None, float | None]:
        """Returns the item that closes the fragment's round, or when to ask again."""
        is_ending = state.status is RunStatus.CLOSING
        if not is_ending:
            if timing.opened_at_s is None or timing.quorum_at_s is None:
                return None, None
            contributors = {delta.item.learner for delta in fragment.pending.values()}
            expected = expected_learners(state, fragment, view)
            is_complete = view.is_mature(state.policy) and expected <= contributors
            deadline_s = timing.quorum_at_s + self.grace_s(state.policy, view, expected)
            if not is_complete and now_s < deadline_s:
                return None, deadline_s
        expired = _expired(fragment, state.policy)
        late = {one.delta for one in expired}
        fresh = [delta for name, delta in fragment.pending.items() if name not in late]
        decided = (*expired, *outliers(state, fragment, fresh))
        named = {one.delta for one in decided}
        members = [weigh(delta, fragment, state.policy) for delta in fresh if delta.item.delta not in named]
        members = members[: most_members(fragment.layout)]  # the others are in the next round
        # A learner whose delta is an outlier has contributed: the round must not go on waiting for it.
        if not members or (not is_ending and not _has_quorum(fragment, state.policy, without=late)):
            return (FateItem(decided), None) if decided else (None, None)
        members = list(bounded(state, fragment, view, members))
        return closed_round(state, fragment, view, members, attempt=fragment.next_attempt, decided=decided), None

    def grace_s(self, policy: Policy, view: MembershipView, expected: Collection[str]) -> float:
        """Returns the seconds that a round waits for the deltas of `expected` once its quorum is in."""
        live = self._step_times_s(view)
        xi_step_s = statistics.median_high(live.values()) if live else UNKNOWN_STEP_S
        steps_s = [step_s for name, step_s in live.items() if name in expected]
        slack_s = policy.tau * xi_step_s - (self._xi_quorum.value + self._xi_sync.value)
        enough_s = GRACE_STEPS * max(steps_s, default=UNKNOWN_STEP_S) + 2 * self._xi_arrival.value
        return max(0.0, min(policy.grace_factor * slack_s, enough_s))

    def _interval_s(self, policy: Policy, view: MembershipView) -> float:
        steps_s = self._step_times_s(view).values()
        return policy.inner_step_count * (statistics.median_high(steps_s) if steps_s else UNKNOWN_STEP_S)

    def _step_times_s(self, view: MembershipView) -> dict[str, float]:
        """Returns the step times of live learners: by their deltas, or as reported until one's came twice."""
        live = {name: learner for name, learner in view.learners.items() if learner.is_live}
        seen = {name: self._steps_s[name] for name in live if name in self._steps_s}
        return seen or {name: one.step_time_s for name, one in live.items() if one.step_time_s is not None}


def most_members(layout: FragmentLayout) -> int:
    """Returns how many deltas one round takes: its commit names a scalar for each of them and each tensor."""
    return max(1, _SCALARS_BYTES // (_SCALAR_BYTES * len(layout.tensors)) - 1)


def is_open(state: RunState, fragment: FragmentState, view: MembershipView) -> bool:
    """Whether the fragment's pending deltas make a round that may close."""
    for delta in fragment.pending.values():
        item, known = delta.item, state.learners.get(delta.item.learner)
        learner = view.learners.get(item.learner, LearnerView(is_live=False))
        is_awaited = learner.is_flushing or (known is not None and known.session != item.session)
        later_steps = learner.step_count - item.last_step
        is_full = max(item.step_count, later_steps) >= state.policy.inner_step_count
        if is_full or (learner.is_live and is_awaited) or (known is not None and known.has_left):
            return True
    return False


def _expired(fragment: FragmentState, policy: Policy) -> tuple[Decided, ...]:
    return tuple(
        Decided(name, Fate.EXPIRED, f"staler than the policy allows. rounds={rounds}")
        for name, delta in fragment.pending.items()
        if (rounds := fragment.rounds_behind(delta.item.base_version, policy.inner_step_count)) > policy.max_staleness
    )


def _has_quorum(fragment: FragmentState, policy: Policy, *, without: Iterable[str] = ()) -> bool:
    excluded = set(without)
    learners = {d.item.learner for name, d in fragment.pending.items() if name not in excluded}
    return len(learners) >= policy.quorum_count


def _is_drained(state: RunState) -> bool:
    return state.status is RunStatus.CLOSING and not any(f.pending or f.closing for f in state.fragments.values())
