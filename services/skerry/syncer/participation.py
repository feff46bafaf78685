"""Who takes part in a round, who is waited for, and how far the round takes the run: pure functions of log and leases.

The formulas are `skerry.algorithm`'s; this module says which learners and deltas they are about.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from skerry.algorithm.rounds import Contribution, delta_weight, participation, round_length, staleness_damping
from skerry.store.log.entries import AcceptedItem, ClosedItem, Decided, Member
from skerry.store.log.state import DeltaState, FragmentState, RunState
from skerry.wire.policy import Policy

# Rounds that a run goes on before a learner that brings nothing no longer counts as working.
_ABSENT_AFTER_ROUNDS: Final = 1.5
# Of the tokens of the largest learner's delta: a learner that brought less is not waited for.
_SMALL_SHARE: Final = 0.4


@dataclass(frozen=True)
class LearnerView:
    """A learner as this replica sees it through leases: advice, never truth."""

    is_live: bool
    step_count: int = 0  # of its last report
    step_time_s: float | None = None  # moving average that it reports


@dataclass(frozen=True)
class MembershipView:
    """Which learners seem to be attached."""

    learners: Mapping[str, LearnerView]
    age_s: float  # how long this replica has been watching the leases

    def is_settled(self, policy: Policy) -> bool:
        """Whether the view is old enough that an absent learner is known to be absent."""
        return self.age_s >= policy.lease_term_s


def weigh(delta: DeltaState, fragment: FragmentState, policy: Policy) -> Member:
    """Returns the delta's place in a set that closes now: its damped weight, and its staleness in versions.

    Staleness damps by rounds and not by versions: where learners are merged one by one each makes a version, and an
    answer that took a moment is not stale for that.
    """
    rounds = fragment.rounds_behind(delta.item.base_version, policy.inner_step_count)
    weight = _weight(delta.item, policy) * staleness_damping(rounds, exponent=policy.staleness_exponent)
    return Member(delta.item.delta, weight, fragment.version - delta.item.base_version)


def expected_learners(state: RunState, fragment: FragmentState, view: MembershipView) -> set[str]:
    """Returns whom a round of `fragment` waits for: before the first close everybody, then recent contributors.

    A learner whose last delta held few tokens is not waited for. It contributes early, so its delta is mostly there in
    time, and it brings less than it costs everybody to have the answer later.
    """
    present = _present_learners(state, fragment, view)
    if not fragment.contributors:
        return present
    recent = set[str]().union(*fragment.contributors)
    largest = max((weight for name, weight in fragment.weights.items() if name in present), default=0.0)
    return {name for name in present & recent if fragment.weights.get(name, largest) >= _SMALL_SHARE * largest}


def closed_round(
    state: RunState,
    fragment: FragmentState,
    view: MembershipView,
    members: Sequence[Member],
    *,
    attempt: int,
    decided: tuple[Decided, ...],
) -> ClosedItem:
    """Returns the entry that freezes `members` for the fragment's next version, with participation and length.

    Without members it makes the round void.
    """
    items = [state.deltas[member.delta].item for member in members]
    rho = _participation(state, fragment, view, members) if members else 1.0
    length = round_length(
        [item.step_count for item in items],
        [member.weight for member in members],
        participation=rho,
        missed_step_count=fragment.missed_step_count((item.learner for item in items), fragment.version),
        inner_step_count=state.policy.inner_step_count,
    )
    return ClosedItem(
        fragment=fragment.layout.name,
        version=fragment.version + 1,
        attempt=attempt,
        members=tuple(members),
        participation=rho,
        decided=decided,
        length=length,
    )


def _present_learners(state: RunState, fragment: FragmentState, view: MembershipView) -> set[str]:
    live = {name for name, learner in view.learners.items() if learner.is_live}
    recent = set[str]().union(*fragment.contributors)
    return {name for name in live | recent if (known := state.learners.get(name)) is not None and not known.has_left}


def _working_learners(state: RunState, fragment: FragmentState, view: MembershipView) -> set[str]:
    """Returns whose share of the work a round of `fragment` lacks without them.

    A learner is taken to work until the run has gone on `_ABSENT_AFTER_ROUNDS` without anything of it, so that a dead
    one damps the others' steps for a round or two, and not for as long as its lease seems to live.
    """
    horizon = _ABSENT_AFTER_ROUNDS * state.policy.inner_step_count
    return {
        name
        for name in _present_learners(state, fragment, view)
        if fragment.newest.step_count
        < horizon + max(fragment.contributed_at.get(name, 0.0), state.learners[name].attached_at_step)
    }


def _participation(state: RunState, fragment: FragmentState, view: MembershipView, members: Iterable[Member]) -> float:
    """Returns rho. A learner of which nothing was merged yet counts for the mean of the contributors."""
    deltas = [(member, state.deltas[member.delta].item) for member in members]
    contributed = [
        Contribution(weight, member.weight / weight if weight else 0.0)
        for member, item in deltas
        for weight in (_weight(item, state.policy),)
    ]
    brought_by = {item.learner for _, item in deltas}
    mean = sum(delta.weight for delta in contributed) / len(brought_by)
    absent = sorted(_working_learners(state, fragment, view) - brought_by)
    return participation(contributed, [fragment.weights.get(name, mean) for name in absent])


def _weight(item: AcceptedItem, policy: Policy) -> float:
    return delta_weight(
        item.token_count, item.step_count, inner_step_count=policy.inner_step_count, weight_cap=policy.weight_cap
    )
