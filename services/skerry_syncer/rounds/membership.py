"""Which learners seem to be live, which take part in a round, and which ones the round waits for.

Pure functions of the log and of the leases, which are advice: they decide how long a round waits, never what is merged.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Final

import msgspec

from skerry.algorithm.rounds import believed_bounds
from skerry.wire.policy import Policy
from skerry_syncer.store.log.state import FragmentState, RunState

# Of the tokens of the largest learner's delta: a learner that brought less is not waited for.
_SMALL_SHARE: Final = 0.4

# The longest duration that a learner may report. A larger value means a wrong clock, and may not fit a Duration.
_LONGEST_S: Final = 365 * 86_400
# What the messages can hold; another replica's advice has no other numbers either.
_Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Duration = Annotated[float, msgspec.Meta(ge=0, le=_LONGEST_S)]
_Reason = Annotated[str, msgspec.Meta(pattern=r"\A[A-Z0-9_]{0,64}\Z")]


@dataclass(frozen=True)
class LearnerReport:
    """A learner's own figures; specified in `skerry/v1/types.proto`."""

    step_count: _Count = 0
    token_count: _Count = 0
    step_time_s: _Duration = 0.0  # 0: not known
    loss: float | None = None
    sent_bytes: _Count = 0
    received_bytes: _Count = 0
    adopted: tuple[tuple[str, _Int64], ...] = ()  # (fragment, version)
    stall_time_s: _Duration = 0.0
    is_flushing: bool = False  # it trains no further before all of its work is acknowledged
    unsent_step_count: _Count = 0
    problem: _Reason = ""
    dropped_step_count: _Count = 0
    is_ending: bool = False  # it has stopped training and sends its last work

    @property
    def token_rate(self) -> float:
        """Tokens a second; 0 if it is not known."""
        steps_s = self.step_count * self.step_time_s
        return self.token_count / steps_s if steps_s > 0 else 0.0


@dataclass(frozen=True)
class LearnerView:
    """A learner as this replica sees it through leases: advice, never truth."""

    is_live: bool = False
    report: LearnerReport = LearnerReport()


@dataclass(frozen=True)
class MembershipView:
    """Which learners seem to be attached."""

    learners: Mapping[str, LearnerView]
    age_s: float  # how long this replica has been watching the leases

    def of(self, learner: str) -> LearnerView:
        """Returns a learner, who is not live and has reported nothing if this replica has not heard of it."""
        return self.learners.get(learner, LearnerView())

    @cached_property
    def live(self) -> dict[str, LearnerReport]:
        """The reports of the learners that are live."""
        return {name: learner.report for name, learner in self.learners.items() if learner.is_live}

    def is_mature(self, policy: Policy) -> bool:
        """Whether the view is old enough that an absent learner is known to be absent."""
        return self.age_s >= policy.lease_term_s


def expected_learners(state: RunState, fragment: FragmentState, view: MembershipView) -> set[str]:
    """Returns the learners that a round of `fragment` waits for.

    Before the first close these are all learners that are present. Later they are those that contributed to one of the
    last two closes, and those that attached since the first of the two, unless they had attached before and never
    brought anything. Learners that bring few tokens are left out: by their last delta, compared with the largest one,
    or before the first close by the tokens a second that they report. Such a learner contributes early, so its delta is
    mostly in time, and waiting for it would cost the others more than it brings.
    """
    present = present_learners(state, fragment, view)
    if fragment.contributors:
        recent = set[str]().union(*fragment.contributors)
        lately = {name for name in present if state.learners[name].attached_at > fragment.close_positions[0]}
        attached = {name for name in lately if name in fragment.weights or not state.learners[name].was_back}
        expected, brought = present & (recent | attached), fragment.weights
    else:
        expected, brought = present, {name: view.of(name).report.token_rate for name in present}
    known = {name: weight for name, weight in brought.items() if name in present and weight}
    bounds = believed_bounds(known)
    largest = max((min(weight, bounds[name]) for name, weight in known.items()), default=0.0)
    return {name for name in expected if brought.get(name, largest) >= _SMALL_SHARE * largest}


def present_learners(state: RunState, fragment: FragmentState, view: MembershipView) -> set[str]:
    """Returns the learners that are live or contributed to one of the last closes, and have not left."""
    recent = set[str]().union(*fragment.contributors)
    return {
        name
        for name in view.live.keys() | recent
        if (known := state.learners.get(name)) is not None and not known.has_left
    }


def participants(state: RunState) -> set[str]:
    """Returns the learners that contributed to one of the last two closes of a fragment."""
    return set[str]().union(*(names for fragment in state.fragments.values() for names in fragment.contributors))


def has_quorum(fragment: FragmentState, policy: Policy, *, without: Collection[str] = ()) -> bool:
    """Whether K learners are in the fragment's round, not counting the deltas named in `without`."""
    learners = {delta.item.learner for name, delta in fragment.pending.items() if name not in without}
    return len(learners) >= policy.quorum_count


def is_open(state: RunState, fragment: FragmentState, view: MembershipView) -> bool:
    """Whether the fragment's pending deltas make a round that may close."""
    for item in (delta.item for delta in fragment.pending.values()):
        known, seen = state.learners.get(item.learner), view.of(item.learner)
        later_steps = seen.report.step_count - item.last_step
        if max(item.step_count, later_steps) >= state.policy.inner_step_count:
            return True
        is_waited_for = seen.report.is_flushing and later_steps > 0
        is_last = seen.report.is_ending or (known is not None and known.session != item.session)
        if (seen.is_live and (is_waited_for or is_last)) or (known is not None and known.has_left):
            return True
    return False
