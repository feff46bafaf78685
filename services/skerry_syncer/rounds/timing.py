"""What one replica has timed of a run's rounds by its own monotonic clock. It is lost without harm.

    xi_step, xi_quorum, xi_sync    step time, first delta to quorum, close to commit
    lateness                       quorum to a delta that answers the round: how long the grace should have been

All but the step times are moving averages over the fragments, x <- x + 0.2 (new - x).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from skerry.wire.policy import Policy
from skerry_syncer.rounds.membership import MembershipView, has_quorum
from skerry_syncer.store.log.entries import AcceptedItem
from skerry_syncer.store.log.state import DeltaState, FragmentState, RunState

# An observation five rounds ago counts for a third of a new one.
_EMA_FACTOR: Final = 0.2
# Step time assumed before any learner has reported one.
_UNKNOWN_STEP_S: Final = 0.5
# The grace window covers the step that a learner is in when it hears of the round, and half of one for its encoding.
_GRACE_STEPS: Final = 1.5


class MergeKey(NamedTuple):
    """Names one frozen set."""

    fragment: str
    version: int
    attempt: int


@dataclass
class RoundTiming:
    """One fragment's current round; times are None until they come."""

    opened_at_s: float | None = None
    quorum_at_s: float | None = None
    last_quorum_at_s: float | None = None  # of the round before
    close_position: int = -1  # of the last close seen: a round may open, close and commit between two looks
    seen: frozenset[str] = frozenset()  # pending deltas that are in the averages
    closing: MergeKey | None = None
    closing_seen_at_s: float = 0.0
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


@dataclass
class _Average:
    value: float = 0.0
    is_empty: bool = True

    def observe(self, value: float) -> None:
        self.value = value if self.is_empty else self.value + _EMA_FACTOR * (value - self.value)
        self.is_empty = False


@dataclass
class RunTiming:
    """The timings of one run on one replica."""

    rounds: dict[str, RoundTiming] = field(default_factory=dict)  # by fragment
    _xi_quorum: _Average = field(default_factory=_Average)
    _xi_sync: _Average = field(default_factory=_Average)
    _lateness: _Average = field(default_factory=_Average)
    _steps_s: dict[str, float] = field(default_factory=dict)  # by learner, by the arrival of its deltas
    _last_steps: dict[tuple[str, str], tuple[int, float]] = field(default_factory=dict)  # when a delta brought which

    def observe(
        self, state: RunState, fragment: FragmentState, view: MembershipView, now_s: float, *, opens: bool
    ) -> RoundTiming:
        """Returns the timing of the fragment's round after a look at `now_s`; `opens` says that it may close."""
        timing = self.rounds.setdefault(fragment.layout.name, RoundTiming())
        self._observe_merge(fragment, timing, now_s)
        if fragment.last_close_position != timing.close_position:
            timing.close_position, timing.last_quorum_at_s = fragment.last_close_position, timing.quorum_at_s
            timing.opened_at_s = timing.quorum_at_s = None
        for delta in (delta for name, delta in fragment.pending.items() if name not in timing.seen):
            self._observe_steps(delta.item, now_s)
            quorum_at_s = timing.answered_quorum_s(delta, fragment, state.policy)
            if quorum_at_s is not None:
                self._lateness.observe(min(now_s - quorum_at_s, self._round_s(state.policy, view)))
        timing.seen = frozenset(fragment.pending)
        if not fragment.pending:  # closed, or what it gathered was given up: the next one has its own time
            timing.opened_at_s = timing.quorum_at_s = None
        if opens:
            timing.opened_at_s = now_s if timing.opened_at_s is None else timing.opened_at_s
        elif timing.quorum_at_s is None:  # the learner whose end would have opened it is gone
            timing.opened_at_s = None
        if timing.opened_at_s is not None and timing.quorum_at_s is None and has_quorum(fragment, state.policy):
            timing.quorum_at_s = now_s
            self._xi_quorum.observe(min(now_s - timing.opened_at_s, self._round_s(state.policy, view)))
        return timing

    def grace_s(self, policy: Policy, view: MembershipView, expected: Collection[str]) -> float:
        """Returns the seconds that a round waits for the deltas of `expected` once its quorum is in."""
        slack_s = policy.tau * self._step_s(view) - (self._xi_quorum.value + self._xi_sync.value)
        steps_s = [step_s for name, step_s in self._steps_of(view).items() if name in expected]
        enough_s = _GRACE_STEPS * max(steps_s, default=_UNKNOWN_STEP_S) + 2 * self._lateness.value
        return max(0.0, min(policy.grace_factor * slack_s, enough_s))

    def _observe_merge(self, fragment: FragmentState, timing: RoundTiming, now_s: float) -> None:
        close = fragment.closing
        key = None if close is None else MergeKey(close.fragment, close.version, close.attempt)
        if key == timing.closing:
            return
        if timing.closing is not None and key is None:
            timing.merge_s = now_s - timing.closing_seen_at_s
            self._xi_sync.observe(timing.merge_s)
        timing.closing, timing.closing_seen_at_s, timing.merge_ended_at_s = key, now_s, None

    def _observe_steps(self, item: AcceptedItem, now_s: float) -> None:
        """Times a learner's steps by the arrival of its deltas of one fragment, since its reports may be wrong."""
        last_step, arrived_at_s = self._last_steps.get((item.learner, item.fragment), (item.last_step, now_s))
        self._last_steps[item.learner, item.fragment] = item.last_step, now_s
        if item.last_step > last_step:
            self._steps_s[item.learner] = (now_s - arrived_at_s) / (item.last_step - last_step)

    def _round_s(self, policy: Policy, view: MembershipView) -> float:
        """Returns the time of H steps, which bounds the averages."""
        return policy.inner_step_count * self._step_s(view)

    def _step_s(self, view: MembershipView) -> float:
        """Returns xi_step: the step time of the median live learner."""
        return statistics.median_high(self._steps_of(view).values() or [_UNKNOWN_STEP_S])

    def _steps_of(self, view: MembershipView) -> dict[str, float]:
        """Returns the step times of live learners: by their deltas, or as reported until one's came twice."""
        live = {name: learner for name, learner in view.learners.items() if learner.is_live}
        seen = {name: self._steps_s[name] for name in live if name in self._steps_s}
        return seen or {name: known.step_time_s for name, known in live.items() if known.step_time_s is not None}
