"""What a close records: which deltas are members, how much each counts, and how long the round is.

Pure functions of log and leases. The formulas are in `skerry.algorithm`; this file selects the learners and deltas that
they apply to. A delta's norm and its learner's weight are compared with those of the others, so that one learner that
lies can neither dominate a round nor stop it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Final

import numpy as np
from numpy.typing import NDArray

from skerry.algorithm.merge import largest_after, reference_norms, with_step
from skerry.algorithm.rounds import (
    Contribution,
    delta_weight,
    outage_length,
    participation,
    round_length,
    share_of_length,
    staleness_damping,
    weight_bounds,
)
from skerry.wire.policy import Policy
from skerry_syncer.rounds.membership import MembershipView, present_learners
from skerry_syncer.store.log.entries import AcceptedItem, ClosedItem, Decided, Fate, Member
from skerry_syncer.store.log.state import DeltaState, FragmentState, RunState

# Rounds that a run goes on before a learner that brings nothing no longer counts as working.
_ABSENT_AFTER_ROUNDS: Final = 1.5
# Of each learner the newest delta in so many versions of a fragment is what its peers are compared with.
_RECENT_VERSIONS: Final = 8
# Below it a delta has no direction.
_SMALLEST_NORM: Final = 2.0**-100


def newest_deltas(state: RunState, fragment: FragmentState) -> dict[str, AcceptedItem]:
    """Returns by learner its newest delta that was merged lately, unless it has left; a roll-back begins anew."""
    newest: dict[str, AcceptedItem] = {}
    for version in islice(state.chain_of_rounds(fragment), _RECENT_VERSIONS):
        for member in reversed(version.close.members):
            item = state.deltas[member.delta].item
            if not state.learners[item.learner].has_left:
                newest.setdefault(item.learner, item)
    return newest


def references(
    state: RunState, fragment: FragmentState, items: Sequence[AcceptedItem]
) -> NDArray[np.float64]:  # (items, tensors)
    """Returns by delta and tensor R of `merge`: the norm a step that its peers lead to expect; infinite without any.

    With one peer alone what the learner itself did counts too, so that neither of two can make the other's deltas count
    less by sending tiny ones.
    """
    before = newest_deltas(state, fragment)
    newest = before | {item.learner: item for item in items}
    paces = dict(fragment.paces)
    for item in items:
        paces[item.learner] = with_step(paces.get(item.learner, ()), item.last_step, item.norm_a_step)
    sizes = np.array(fragment.layout.sizes, np.float64)
    rows = []
    for item in items:
        begin = item.last_step - item.step_count
        peers = [
            _scaled(other, largest_after(paces[name], begin)) for name, other in newest.items() if name != item.learner
        ]
        if len(peers) == 1 and item.learner in before:
            peers.append(_scaled(before[item.learner], before[item.learner].norm_a_step))
        rows.append(reference_norms(np.array(peers).reshape(-1, len(sizes)), sizes))
    return np.array(rows).reshape(-1, len(sizes))


def _scaled(item: AcceptedItem, norm: float) -> NDArray[np.float64]:  # (tensors,)
    """Returns a delta's norms by tensor, in proportion, for a whole of `norm`."""
    norms = np.sqrt(np.array(item.squared_norms))
    scaled: NDArray[np.float64] = norms * (norm / max(math.hypot(*norms), _SMALLEST_NORM))
    return scaled


def outliers(state: RunState, fragment: FragmentState, deltas: Sequence[DeltaState]) -> tuple[Decided, ...]:
    """Names deltas whose norm no training explains.

    It exceeds by the policy's ratio, for each of at most H steps, what the learner's peers lead to expect and the
    largest that the learner itself had, where there are either. Anything less is clipped by the merge.
    """
    policy, items = state.policy, [delta.item for delta in deltas]
    if policy.quarantine_ratio == 0:
        return ()
    quarantined = []
    for item, peers in zip(items, references(state, fragment, items), strict=True):
        known = [math.hypot(*peers)] if np.isfinite(peers).all() else []
        usual = max((*known, *_own_norms(state, fragment, item.learner)), default=0.0)
        step = item.norm_a_step * min(1.0, item.step_count / policy.inner_step_count)
        if 0 < usual * policy.quarantine_ratio < step:
            quarantined.append(Decided(item.delta, Fate.QUARANTINED, f"norm is an outlier. ratio={step / usual:.1f}"))
    return tuple(quarantined)


def _own_norms(state: RunState, fragment: FragmentState, learner: str) -> Iterator[float]:
    """Yields the norms a step of a learner's merged deltas, and of those quarantined since the newest version.

    What comes a second time while nobody else goes on is training: the same weights lead to the same steps for ever.
    """
    yield from (norm for _, norm in fragment.paces.get(learner, ()))
    for delta in state.deltas.values():
        is_own = (delta.item.learner, delta.item.fragment) == (learner, fragment.layout.name)
        if is_own and delta.fate is Fate.QUARANTINED and delta.position > fragment.newest.position:
            yield delta.item.norm_a_step


def members_of(
    state: RunState, fragment: FragmentState, view: MembershipView, deltas: Sequence[DeltaState]
) -> tuple[Member, ...]:
    """Returns the places of these deltas in a set that closes now: damped weights w f, and staleness in versions.

    Staleness damps by rounds and not by versions: where learners are merged one by one each makes a version, and an
    answer that took a moment is not stale for that. A learner's deltas together count for its bound at most.
    """
    items, policy = [delta.item for delta in deltas], state.policy
    bounds, brought = _bounds(state, fragment, view, items), defaultdict[str, float](float)
    for item in items:
        brought[item.learner] += _weight(item, policy)
    return tuple(
        Member(
            item.delta,
            _weight(item, policy)
            * min(1.0, bounds[item.learner] / brought[item.learner] if brought[item.learner] else 1.0)
            * _damping(item, fragment, policy),
            fragment.version - item.base_version,
        )
        for item in items
    )


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
    step_counts, full = [item.step_count for item in items], state.policy.inner_step_count
    length = round_length(step_counts, [member.weight for member in members], inner_step_count=full)
    rho = _participation(state, fragment, view, members, length) if members else 1.0
    missed = fragment.missed_step_count((item.learner for item in items), fragment.version)
    after_outage = outage_length(step_counts, participation=rho, missed_step_count=missed, inner_step_count=full)
    return ClosedItem(
        fragment=fragment.layout.name,
        version=fragment.version + 1,
        attempt=attempt,
        members=tuple(members),
        participation=rho,
        decided=decided,
        length=after_outage or length,
    )


def _participation(
    state: RunState, fragment: FragmentState, view: MembershipView, members: Sequence[Member], length: float
) -> float:
    """Returns rho of a round of that length.

    An absent learner counts with what it brought last, within the bound by the others. Before its first delta it counts
    with the steps that it reports, at the contributors' weight for a round.
    """
    items = [state.deltas[member.delta].item for member in members]
    contributed = []
    for member, item in zip(members, items, strict=True):
        damping = _damping(item, fragment, state.policy)
        contributed.append(Contribution(share_of_length(member.weight / damping, item.step_count, length), damping))
    bounds = _bounds(state, fragment, view, items)
    brought_by = {item.learner for item in items}
    mean = sum(delta.weight for delta in contributed) / len(brought_by)
    absent = []
    for name in sorted(_working_learners(state, fragment, view) - brought_by):
        if name in fragment.weights:
            weight = min(fragment.weights[name], bounds[name])
            step_count = fragment.step_counts[name]
        else:
            step_count = view.learners[name].step_count if name in view.learners else 0
            weight = mean * min(1.0, step_count / length)
        absent.append(share_of_length(weight, step_count, length))
    return participation(contributed, absent)


def _working_learners(state: RunState, fragment: FragmentState, view: MembershipView) -> set[str]:
    """Returns the learners whose absence from a round of `fragment` lowers its participation.

    A learner counts as working until the run has gone on for `_ABSENT_AFTER_ROUNDS` without a delta of it. So a dead
    learner damps the others' steps for a round or two, and not until its lease expires. Attaching again does not count
    as work.
    """
    horizon = _ABSENT_AFTER_ROUNDS * state.policy.inner_step_count
    working = set()
    for name in present_learners(state, fragment, view):
        known, since = state.learners[name], fragment.contributed_at.get(name, -math.inf)
        if not known.was_back:
            since = max(since, known.attached_at_step)
        if fragment.newest.step_count < horizon + since:
            working.add(name)
    return working


def _bounds(
    state: RunState, fragment: FragmentState, view: MembershipView, items: Sequence[AcceptedItem]
) -> dict[str, float]:
    """Returns what each working learner counts for at most in a round of these deltas.

    Its peers count with what they bring to the round, or brought last if that is more.
    """
    known = fragment.weights
    brought = {name: known[name] for name in _working_learners(state, fragment, view) if name in known}
    for item in items:
        last = brought.get(item.learner, known.get(item.learner, 0.0))
        brought[item.learner] = max(last, _weight(item, state.policy))
    return weight_bounds(brought, weight_cap=state.policy.weight_cap)


def _damping(item: AcceptedItem, fragment: FragmentState, policy: Policy) -> float:
    rounds = fragment.rounds_behind(item.base_version, policy.inner_step_count)
    return staleness_damping(rounds)


def _weight(item: AcceptedItem, policy: Policy) -> float:
    return delta_weight(
        item.token_count, item.step_count, inner_step_count=policy.inner_step_count, weight_cap=policy.weight_cap
    )


def closed_without(state: RunState, view: MembershipView, closing: ClosedItem, delta: str) -> ClosedItem | None:
    """Returns the item that freezes a set again without an unreadable delta; None if that is not one of the set."""
    members = tuple(member for member in closing.members if member.delta != delta)
    if len(members) == len(closing.members):
        return None
    decided = (Decided(delta, Fate.QUARANTINED, "its stored parts can't be read"),)
    fragment = state.fragments[closing.fragment]
    return closed_round(state, fragment, view, members, attempt=closing.attempt + 1, decided=decided)
