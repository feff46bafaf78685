"""Who takes part in a round, who is waited for, and for how much of the run's work each counts: pure functions.

Source: Decoupled DiLoCo (arXiv 2604.21428), weights by tokens and steps; the rest is this project's.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from skerry.algorithm.round_length import delta_weight
from skerry.store.log.entries import AcceptedItem, Member
from skerry.store.log.fold import RunState
from skerry.store.log.state import REMEMBERED_CLOSES, DeltaState, FragmentState
from skerry.wire.policy import Policy

# Times H that a run goes on before a learner that brings nothing no longer counts as working.
ABSENT_AFTER: Final = 1.5
# Steps of the fastest that a step takes at which nobody waits for it. A delta of p H steps weighs p^2 of a whole one.
_SLOW_STEP: Final = 2.5


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


def weigh(delta: DeltaState, fragment: FragmentState, policy: Policy) -> tuple[DeltaState, Member]:
    """Returns the delta with its place in a set that closes now: weight w f and staleness in versions.

    f = (1 + s)^-a counts s in rounds, that is in H steps of the run, to the nearest whole one: where learners are
    merged one by one each makes a version, and an answer that took a moment is not stale for that.
    """
    base = delta.item.base_version
    rounds = math.floor(fragment.steps_since(base, fragment.version) / policy.inner_step_count + 0.5)
    weight = _weight(delta.item, policy) * (1 + rounds) ** -policy.staleness_exponent
    return delta, Member(delta.item.delta, weight, fragment.version - base)


def expected_learners(state: RunState, fragment: FragmentState, view: MembershipView) -> set[str]:
    """Returns whom a round of `fragment` waits for: who is there and has not missed the last two closes.

    One that is slow is not waited for: its delta is mostly there in time, for it contributes early, and weighs less
    than it costs everybody to have the answer later by the rest of its step. Nor is one that has
    nothing merged yet and has told of no second step for as long as a round takes.
    """
    recent = set[str]().union(*fragment.contributors)
    is_early = len(fragment.close_positions) < REMEMBERED_CLOSES
    round_s = state.policy.inner_step_count * _fastest_s(view)
    has_told = math.isfinite(round_s) and round_s >= state.policy.lease_term_s  # reports come oftener
    idle = {name for name in view.learners if has_told and not _has_begun(view, name)}
    return {
        name
        for name in _present_learners(state, fragment, view) - slow_learners(view)
        if name in fragment.weights or name not in idle
        if is_early or name in recent or state.learners[name].attached_at > fragment.close_positions[0]
    }


def slow_learners(view: MembershipView) -> set[str]:
    """Returns who takes `_SLOW_STEP` times as long for a step as the fastest, or longer."""
    longest_s = _SLOW_STEP * _fastest_s(view)
    return {name for name, one in view.learners.items() if one.step_time_s is not None and one.step_time_s >= longest_s}


def _fastest_s(view: MembershipView) -> float:
    return min((one.step_time_s for one in view.learners.values() if one.is_live and one.step_time_s), default=math.inf)


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
    has just begun, or compiles its model still, shortens nobody's step.
    """
    if not _has_begun(view, name):
        return 0.0
    learner = view.learners.get(name)
    mean = statistics.fmean(contributed.values())
    times_s = [one.step_time_s for key, one in view.learners.items() if key in contributed and one.step_time_s]
    if learner is None or not learner.step_time_s or not times_s:
        return mean
    return mean * min(1.0, statistics.median(times_s) / learner.step_time_s) ** 2


def _has_begun(view: MembershipView, name: str) -> bool:
    """Whether a learner has told that it trains; one that nothing is known of may have."""
    learner = view.learners.get(name)
    return learner is None or learner.step_count >= _PACED_STEPS


# Steps after which a learner's pace can be known.
_PACED_STEPS: Final = 2


def _weight(item: AcceptedItem, policy: Policy) -> float:
    return delta_weight(
        item.step_count, item.token_count, inner_step_count=policy.inner_step_count, weight_cap=policy.weight_cap
    )
