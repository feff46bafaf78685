"""Decides when rounds close, with which deltas, and which closes this replica merges.

Pure decisions: no I/O, no clock, no randomness; time comes in as an argument. What is decided is proposed to the log,
and only the fold makes it true, so any number of replicas may run an engine each over the same log.

A round of a fragment is *open* when a pending delta holds at least H steps, or its learner has trained H steps since
it took the delta (so that a late, short delta whose learner is alone now can't wait for ever), flushes steps since or
is back with another session (neither can be sent before), trains no more, or has left. An open round closes

    at once        when every expected learner is in it: live leases, and the contributors of the last closes until
                   they leave or miss two;
    after a grace  from the moment that K learners are in it: min(gamma * slack, 1.5 steps of the slowest that
                   is waited for plus twice the mean lateness), slack = tau * xi_step - (xi_quorum + xi_sync);
                   negative: at once.

    xi_step, xi_quorum, xi_sync    step time of the median learner, first delta to quorum, close to commit
    lateness                       quorum to a delta that answers the round: how long the grace should have been

All but the step times are moving averages over the fragments, x <- x + 0.2 (new - x), and all are by this replica's own
monotonic clock. A step time is that between two deltas of a learner, but not less than it reports: after an outage
of the syncers the second delta holds the steps of hours and comes at once. Until two deltas of a fragment have come
from anybody, it is what learners report, which may be far too short: where a device computes by itself, a step returns
before it is done.

The replica that closed a round merges it. Another one merges it too if no commit comes within 3 s and four times what
the fragment's last merge took, at most a term; which of both commits is for the log to decide.

While a replica's view of the leases is younger than a term, it can't know which learners are missing, and only quorum
and grace close a round. The grace is all of gamma * slack then: after an outage of the syncers learners come back
seconds apart with the steps of hours, and a delta that is merged alone counts for H steps at most.

Source: Decoupled DiLoCo (arXiv 2604.21428), minimum quorum and adaptive grace window; factors and bounds are this
project's.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final

from skerry.wire.policy import Policy
from skerry_syncer.rounds.closing import close_round
from skerry_syncer.rounds.membership import MembershipView, expected_learners, has_quorum, is_open
from skerry_syncer.store.log.entries import AcceptedItem, ClosedItem, Item, RunStatus, StatusItem
from skerry_syncer.store.log.state import DeltaState, FragmentState, Outcome, RunState

# A merge that another replica has closed is taken over after so many seconds, and so many times what the last one took.
_TAKE_OVER_S: Final = 3.0
_TAKE_OVER_FACTOR: Final = 4.0
# An observation five rounds ago counts for a third of a new one.
_EMA_FACTOR: Final = 0.2
# Step time assumed before any learner has reported one.
_UNKNOWN_STEP_S: Final = 0.5
# The grace window covers the step that a learner is in when it hears of the round, and half of one for its encoding.
_GRACE_STEPS: Final = 1.5


@dataclass(frozen=True)
class Decisions:
    """What to do now, what is open, and when to ask again if nothing happens before."""

    items: tuple[Item, ...]  # to propose to the log
    merges: tuple[ClosedItem, ...]  # to start
    open_rounds: tuple[tuple[str, int], ...]  # (fragment, version to be made)
    wake_at_s: float | None  # on the clock of `now_s`


@dataclass
class _Round:
    """One fragment's current round as this replica timed it; times are None until they come."""

    opened_at_s: float | None = None
    quorum_at_s: float | None = None
    last_quorum_at_s: float | None = None  # of the round before
    close_position: int = -1  # of the last close seen: a round may open, close and commit between two looks
    seen: frozenset[str] = frozenset()  # pending deltas that are in the averages
    closing: ClosedItem | None = None  # the frozen set
    closing_seen_at_s: float = 0.0
    is_merging: bool = False  # here
    merge_ended_at_s: float | None = None  # here, without a commit
    merge_s: float = math.inf  # from the last close to its commit

    def answered_quorum_s(self, delta: DeltaState, fragment: FragmentState, policy: Policy) -> float | None:
        """Returns when the round that a delta answers had its quorum; None where it answers none.

        A delta of fewer than H steps answers the round that gathers, or comes late to the one before, whose version it
        does not know yet; else it is early for the next.
        """
        if delta.item.step_count >= policy.inner_step_count:
            return None
        if self.quorum_at_s is not None:
            return self.quorum_at_s
        newest = fragment.version if fragment.closing is None else fragment.closing.version
        return self.last_quorum_at_s if delta.item.base_version < newest else None


class RoundEngine:
    """Decides for one run on one replica; holds nothing but timings, which are lost without harm."""

    def __init__(self) -> None:
        """Starts without any timing."""
        self._rounds: dict[str, _Round] = {}  # by fragment
        self._own: dict[str, ClosedItem] = {}  # by fragment, of the sets that this replica froze: the one to merge
        self._xi_quorum_s: float | None = None
        self._xi_sync_s: float | None = None
        self._lateness_s: float | None = None
        self._steps_s: dict[str, float] = {}  # step times by learner
        self._last_steps: dict[tuple[str, str], tuple[int, float]] = {}  # by session and fragment, and when it came

    def decide(self, state: RunState, view: MembershipView, now_s: float, *, may_close: bool = True) -> Decisions:
        """Returns what follows from the log and the view at `now_s`.

        To be called after every change of either, and at `wake_at_s`. With `may_close` false (draining) nothing new is
        closed. A merge is named once, until `merge_ended` is called for it.
        """
        items: list[Item] = []
        merges: list[ClosedItem] = []
        open_rounds: list[tuple[str, int]] = []
        wakes: list[float] = []
        for name, fragment in sorted(state.fragments.items()):
            opens = is_open(state, fragment, view)
            if opens and state.status is RunStatus.OPEN:
                open_rounds.append((name, fragment.version + (1 if fragment.closing is None else 2)))
            timed = self._observed(state, fragment, view, now_s, opens=opens)
            if timed.closing is not None:
                due_s = math.inf if timed.is_merging else self._merge_due_s(timed, timed.closing, state.policy)
                timed.is_merging |= due_s <= now_s
                if due_s <= now_s:
                    merges.append(timed.closing)
            elif fragment.pending and may_close and state.status in (RunStatus.OPEN, RunStatus.CLOSING):
                due_s = self._close_due_s(state, fragment, view, timed)
                if due_s <= now_s:
                    items.extend(close_round(state, fragment, view))
            else:
                continue
            if now_s < due_s < math.inf:
                wakes.append(due_s)
        if may_close and not items and _is_drained(state):
            items.append(StatusItem(RunStatus.CLOSED))
        return Decisions(tuple(items), tuple(merges), tuple(open_rounds), min(wakes, default=None))

    def appended(self, outcomes: Iterable[Outcome]) -> None:
        """Says what the log made of items of this replica, which merges the sets that it froze at once."""
        for outcome in outcomes:
            if outcome.rejection is None and isinstance(outcome.item, ClosedItem):
                self._own[outcome.item.fragment] = outcome.item

    def merge_ended(self, closing: ClosedItem, now_s: float) -> None:
        """Says that this replica's merge of the set is over; without a commit it is due again a term from now."""
        timed = self._rounds[closing.fragment]
        if timed.closing == closing:
            timed.is_merging, timed.merge_ended_at_s = False, now_s

    def open_since_s(self) -> list[float]:
        """Returns when each round that is open was first seen open here, on the clock of `now_s`."""
        return [timed.opened_at_s for timed in self._rounds.values() if timed.opened_at_s is not None]

    def grace_s(self, policy: Policy, view: MembershipView, expected: Collection[str]) -> float:
        """Returns the seconds that a round waits for the deltas of `expected` once its quorum is in."""
        slack_s = policy.tau * self._step_s(view) - ((self._xi_quorum_s or 0.0) + (self._xi_sync_s or 0.0))
        slowest_s = max((step_s for name, step_s in self._steps_of(view).items() if name in expected), default=0.0)
        enough_s = _GRACE_STEPS * (slowest_s or _UNKNOWN_STEP_S) + 2 * (self._lateness_s or 0.0)
        if not view.is_mature(policy):
            enough_s = math.inf
        return max(0.0, min(policy.grace_factor * slack_s, enough_s))

    def _merge_due_s(self, timed: _Round, closing: ClosedItem, policy: Policy) -> float:
        """Returns when this replica merges the frozen set: its own at once, another's when that seems to be dead."""
        if timed.merge_ended_at_s is not None:
            return timed.merge_ended_at_s + policy.lease_term_s
        if self._own.get(closing.fragment) == closing:
            return timed.closing_seen_at_s
        return timed.closing_seen_at_s + min(policy.lease_term_s, _TAKE_OVER_S + _TAKE_OVER_FACTOR * timed.merge_s)

    def _close_due_s(self, state: RunState, fragment: FragmentState, view: MembershipView, timed: _Round) -> float:
        """Returns when the fragment's round closes, if nothing happens before; infinity: not without another delta."""
        if state.status is RunStatus.CLOSING:
            return -math.inf
        if timed.opened_at_s is None or timed.quorum_at_s is None:
            return math.inf
        expected = expected_learners(state, fragment, view)
        contributors = {delta.item.learner for delta in fragment.pending.values()}
        if view.is_mature(state.policy) and expected <= contributors:
            return timed.quorum_at_s
        return timed.quorum_at_s + self.grace_s(state.policy, view, expected)

    def _observed(
        self, state: RunState, fragment: FragmentState, view: MembershipView, now_s: float, *, opens: bool
    ) -> _Round:
        """Returns the fragment's round after a look at `now_s`; `opens` says that it may close."""
        timed = self._rounds.setdefault(fragment.layout.name, _Round())
        if fragment.closing != timed.closing:
            if fragment.closing is None:
                timed.merge_s = now_s - timed.closing_seen_at_s
                self._xi_sync_s = _averaged(self._xi_sync_s, timed.merge_s)
            timed.closing, timed.closing_seen_at_s = fragment.closing, now_s
            timed.is_merging, timed.merge_ended_at_s = False, None
        if fragment.last_close_position != timed.close_position:
            timed.close_position, timed.last_quorum_at_s = fragment.last_close_position, timed.quorum_at_s
            timed.opened_at_s = timed.quorum_at_s = None
        self._observe_gathering(timed, state.policy, fragment, view, now_s, opens=opens)
        return timed

    def _observe_gathering(
        self, timed: _Round, policy: Policy, fragment: FragmentState, view: MembershipView, now_s: float, *, opens: bool
    ) -> None:
        round_s = policy.inner_step_count * self._step_s(view)  # a round that waited for hours says nothing
        for delta in (delta for name, delta in fragment.pending.items() if name not in timed.seen):
            self._observe_steps(delta.item, now_s)
            quorum_at_s = timed.answered_quorum_s(delta, fragment, policy)
            if quorum_at_s is not None:
                self._lateness_s = _averaged(self._lateness_s, min(now_s - quorum_at_s, round_s))
        timed.seen = frozenset(fragment.pending)
        if not fragment.pending:  # closed, or what it gathered was given up: the next one has its own time
            timed.opened_at_s = timed.quorum_at_s = None
        if opens:
            timed.opened_at_s = now_s if timed.opened_at_s is None else timed.opened_at_s
        elif timed.quorum_at_s is None:  # the learner whose end would have opened it is gone
            timed.opened_at_s = None
        if timed.opened_at_s is not None and timed.quorum_at_s is None and has_quorum(fragment, policy):
            timed.quorum_at_s = now_s
            self._xi_quorum_s = _averaged(self._xi_quorum_s, min(now_s - timed.opened_at_s, round_s))

    def _observe_steps(self, item: AcceptedItem, now_s: float) -> None:
        last_step, arrived_at_s = self._last_steps.get((item.session, item.fragment), (item.last_step, now_s))
        self._last_steps[item.session, item.fragment] = item.last_step, now_s
        if item.last_step > last_step:
            self._steps_s[item.learner] = (now_s - arrived_at_s) / (item.last_step - last_step)

    def _steps_of(self, view: MembershipView) -> dict[str, float]:
        """Returns the step times of live learners."""
        timed = {
            name: max(self._steps_s[name], report.step_time_s)
            for name, report in view.live.items()
            if name in self._steps_s
        }
        return timed or {name: report.step_time_s for name, report in view.live.items() if report.step_time_s}

    def _step_s(self, view: MembershipView) -> float:
        """Returns xi_step."""
        return statistics.median_high(self._steps_of(view).values() or [_UNKNOWN_STEP_S])


def _averaged(average: float | None, value: float) -> float:
    return value if average is None else average + _EMA_FACTOR * (value - average)


def _is_drained(state: RunState) -> bool:
    return state.status is RunStatus.CLOSING and not any(f.pending or f.closing for f in state.fragments.values())
