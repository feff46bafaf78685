"""Decides when rounds close, with which deltas, and which closes this replica merges.

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
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from skerry.wire.layout import FragmentLayout
from skerry.wire.policy import Policy
from skerry_syncer.rounds.closing import closed_round, members_of, outliers
from skerry_syncer.rounds.membership import MembershipView, expected_learners, has_quorum, is_open
from skerry_syncer.rounds.timing import MergeKey, RoundTiming, RunTiming
from skerry_syncer.store.log.entries import ClosedItem, Decided, Fate, FateItem, Item, RunStatus, StatusItem
from skerry_syncer.store.log.run_log import MAX_APPEND_BYTES
from skerry_syncer.store.log.state import FragmentState, Outcome, RunState

# A commit has to fit one log entry: bytes of all but the names of its update, and of one number in quotes with its
# comma.
_SCALARS_BYTES: Final = MAX_APPEND_BYTES * 3 // 4
_SCALAR_BYTES: Final = 11
# A merge that another replica has closed is taken over after so many seconds, and so many times what the last one took.
_TAKE_OVER_S: Final = 3.0
_TAKE_OVER_FACTOR: Final = 4.0


@dataclass(frozen=True)
class Decisions:
    """What to do now: items to propose to the log, merges to start, and when to ask again if nothing happens before."""

    items: tuple[Item, ...]
    merges: tuple[MergeKey, ...]
    wake_at_s: float | None  # on the clock of `now_s`


class RoundEngine:
    """Decides for one run on one replica; holds nothing but timings, which are lost without harm."""

    def __init__(self) -> None:
        """Starts without any timing."""
        self.timing = RunTiming()
        self._own: set[MergeKey] = set()  # sets that an entry of this replica froze
        self._merging: set[MergeKey] = set()

    def decide(self, state: RunState, view: MembershipView, now_s: float, *, may_close: bool = True) -> Decisions:
        """Returns what follows from the log and the view at `now_s`.

        To be called after every change of either, and at `wake_at_s`. With `may_close` false (draining) nothing new is
        closed. A merge is named once, until `merge_ended` is called for it.
        """
        items: list[Item] = []
        merges: list[MergeKey] = []
        wakes: list[float | None] = []
        for _, fragment in sorted(state.fragments.items()):
            opens = is_open(state, fragment, view)
            timing = self.timing.observe(state, fragment, view, now_s, opens=opens)
            if timing.closing is not None:
                if timing.closing in self._merging:
                    continue
                due_s = self._merge_due_s(timing, state.policy)
                if due_s <= now_s:
                    merges.append(timing.closing)
                else:
                    wakes.append(due_s)
            elif fragment.pending and may_close and state.status in (RunStatus.OPEN, RunStatus.CLOSING):
                close_s = self._close_due_s(state, fragment, view, timing)
                if close_s is not None and close_s <= now_s:
                    items.extend(_close(state, fragment, view))
                else:
                    wakes.append(close_s)
        self._merging.update(merges)
        if may_close and not items and _is_drained(state):
            items.append(StatusItem(RunStatus.CLOSED))
        wake_at_s = min((wake_s for wake_s in wakes if wake_s is not None), default=None)
        return Decisions(tuple(items), tuple(merges), wake_at_s)

    def merge_ended(self, key: MergeKey, now_s: float) -> None:
        """Says that this replica's merge of `key` is over; without a commit it is due again a term from now."""
        self._merging.discard(key)
        self._own.discard(key)
        timing = self.timing.rounds.get(key.fragment)
        if timing is not None and timing.closing == key:
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
        return [timing.opened_at_s for timing in self.timing.rounds.values() if timing.opened_at_s is not None]

    def open_rounds(self, state: RunState, view: MembershipView) -> tuple[tuple[str, int], ...]:
        """Returns (fragment, version to be made) of every open round."""
        return tuple(
            (name, fragment.version + (1 if fragment.closing is None else 2))
            for name, fragment in sorted(state.fragments.items())
            if state.status is RunStatus.OPEN and is_open(state, fragment, view)
        )

    def _merge_due_s(self, timing: RoundTiming, policy: Policy) -> float:
        """Returns when this replica merges the frozen set: its own at once, another's when that seems to be dead."""
        if timing.closing in self._own:
            return timing.closing_seen_at_s
        if timing.merge_ended_at_s is not None:
            return timing.merge_ended_at_s + policy.lease_term_s
        return timing.closing_seen_at_s + min(policy.lease_term_s, _TAKE_OVER_S + _TAKE_OVER_FACTOR * timing.merge_s)

    def _close_due_s(
        self, state: RunState, fragment: FragmentState, view: MembershipView, timing: RoundTiming
    ) -> float | None:
        """Returns when the fragment's round closes, if nothing happens before; None: not without another delta."""
        if state.status is RunStatus.CLOSING:
            return -math.inf
        if timing.opened_at_s is None or timing.quorum_at_s is None:
            return None
        expected = expected_learners(state, fragment, view)
        contributors = {delta.item.learner for delta in fragment.pending.values()}
        if view.is_mature(state.policy) and expected <= contributors:
            return timing.quorum_at_s
        return timing.quorum_at_s + self.timing.grace_s(state.policy, view, expected)


def most_members(layout: FragmentLayout) -> int:
    """Returns how many deltas one round takes: its commit names a scalar for each of them and each tensor."""
    return max(1, _SCALARS_BYTES // (_SCALAR_BYTES * len(layout.tensors)) - 1)


def _close(state: RunState, fragment: FragmentState, view: MembershipView) -> list[Item]:
    """Returns the item that freezes the fragment's round, or the fates of its deltas where too few are left."""
    expired = _expired(fragment, state.policy)
    late = {decided.delta for decided in expired}
    fresh = [delta for name, delta in fragment.pending.items() if name not in late]
    decided = (*expired, *outliers(state, fragment, fresh))
    refused = {fate.delta for fate in decided}
    deltas = [delta for delta in fresh if delta.item.delta not in refused]
    deltas = deltas[: most_members(fragment.layout)]  # the others are in the next round
    # A learner whose delta is an outlier has contributed: the round must not go on waiting for it.
    is_complete = state.status is RunStatus.CLOSING or has_quorum(fragment, state.policy, without=late)
    if not deltas or not is_complete:
        return [FateItem(decided)] if decided else []
    members = members_of(state, fragment, view, deltas)
    return [closed_round(state, fragment, view, members, attempt=fragment.next_attempt, decided=decided)]


def _expired(fragment: FragmentState, policy: Policy) -> tuple[Decided, ...]:
    return tuple(
        Decided(name, Fate.EXPIRED, f"staler than the policy allows. rounds={rounds}")
        for name, delta in fragment.pending.items()
        if (rounds := fragment.rounds_behind(delta.item.base_version, policy.inner_step_count)) > policy.max_staleness
    )


def _is_drained(state: RunState) -> bool:
    return state.status is RunStatus.CLOSING and not any(f.pending or f.closing for f in state.fragments.values())
