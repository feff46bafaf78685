"""Which learners seem to be live, which take part in a round, and which ones the round waits for.

Pure functions of the log and of the leases, which are advice: they decide how long a round waits, never what is merged.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from skerry.algorithm.rounds import weight_bounds
from skerry.wire.policy import Policy
from skerry_syncer.store.log.state import FragmentState, RunState

# Of the tokens of the largest learner's delta: a learner that brought less is not waited for.
_SMALL_SHARE: Final = 0.4


@dataclass(frozen=True)
class LearnerView:
    """A learner as this replica sees it through leases: advice, never truth."""

    is_live: bool
    step_count: int = 0  # of its last report
    step_time_s: float | None = None  # moving average that it reports
    token_rate: float = 0.0  # tokens a second, by that average; 0: not known
    is_flushing: bool = False  # it has stopped training and sends its last work


@dataclass(frozen=True)
class MembershipView:
    """Which learners seem to be attached."""

    learners: Mapping[str, LearnerView]
    age_s: float  # how long this replica has been watching the leases

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
        expected, brought = present, {name: view.learners[name].token_rate for name in present}
    known = {name: weight for name, weight in brought.items() if name in present and weight}
    bounds = weight_bounds(known, weight_cap=state.policy.weight_cap)
    largest = max((min(weight, bounds[name]) for name, weight in known.items()), default=0.0)
    return {name for name in expected if brought.get(name, largest) >= _SMALL_SHARE * largest}


def present_learners(state: RunState, fragment: FragmentState, view: MembershipView) -> set[str]:
    """Returns the learners that are live or contributed to one of the last closes, and have not left."""
    live = {name for name, learner in view.learners.items() if learner.is_live}
    recent = set[str]().union(*fragment.contributors)
    return {name for name in live | recent if (known := state.learners.get(name)) is not None and not known.has_left}


def participants(state: RunState) -> set[str]:
    """Returns the learners that contributed to one of the last two closes of a fragment."""
    return set[str]().union(*(names for fragment in state.fragments.values() for names in fragment.contributors))


def has_quorum(fragment: FragmentState, policy: Policy, *, without: Collection[str] = ()) -> bool:
    """Whether K learners are in the fragment's round, not counting the deltas named in `without`."""
    learners = {delta.item.learner for name, delta in fragment.pending.items() if name not in without}
    return len(learners) >= policy.quorum_count


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
