"""What a close records: which deltas are members, how much each counts, and how long the round is.

Pure functions of log and leases. The formulas are in `skerry.algorithm`; this file selects the learners and deltas that
they apply to. A delta's norm and its learner's weight are compared with those of the others, so that what no training
explains can neither dominate a round nor stop it.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Final

import numpy as np
from numpy.typing import NDArray

from skerry.algorithm.merge import largest_after, reference_norms, with_step
from skerry.algorithm.rounds import (
    ABSENT_AFTER_ROUNDS,
    Contribution,
    believed_bounds,
    delta_weight,
    outage_length,
    participation,
    relative_speed,
    round_length,
    staleness_damping,
)
from skerry.wire.policy import Policy
from skerry_syncer.rounds.membership import MembershipView, has_quorum, present_learners
from skerry_syncer.store.log.entries import (
    AcceptedItem,
    ClosedItem,
    Decided,
    Fate,
    FateItem,
    Item,
    Member,
    RunStatus,
)
from skerry_syncer.store.log.run_log import MAX_APPEND_BYTES
from skerry_syncer.store.log.state import DeltaState, FragmentState, RunState

# A commit has to fit one log entry: bytes of all but the names of its update, and of one number in quotes with its
# comma.
_SCALARS_BYTES: Final = MAX_APPEND_BYTES * 3 // 4
_SCALAR_BYTES: Final = 11
# Of each learner the newest delta in so many versions of a fragment is what its peers are compared with.
_RECENT_VERSIONS: Final = 8
# Below it a delta has no direction.
_SMALLEST_NORM: Final = 2.0**-100


def close_round(state: RunState, fragment: FragmentState, view: MembershipView) -> list[Item]:
    """Returns the item that freezes the fragment's round, or the fates of its deltas where too few are left."""
    expired = _expired(fragment, state.policy)
    late = {decided.delta for decided in expired}
    fresh = [delta for name, delta in fragment.pending.items() if name not in late]
    decided = (*expired, *_outliers(state, fragment, fresh))
    refused = {fate.delta for fate in decided}
    # The commit names a scalar for each delta and tensor. What does not fit is in the next round.
    most = max(1, _SCALARS_BYTES // (_SCALAR_BYTES * len(fragment.layout.tensors)) - 1)
    deltas = [delta for delta in fresh if delta.item.delta not in refused][:most]
    # A learner whose delta is an outlier has contributed: the round must not go on waiting for it.
    is_complete = state.status is RunStatus.CLOSING or has_quorum(fragment, state.policy, without=late)
    if not deltas or not is_complete:
        return [FateItem(decided)] if decided else []
    return [_closed(state, state.policy, fragment, view, deltas, attempt=fragment.next_attempt, decided=decided)]


def _expired(fragment: FragmentState, policy: Policy) -> tuple[Decided, ...]:
    return tuple(
        Decided(name, Fate.EXPIRED, f"staler than the policy allows. rounds={rounds}")
        for name, delta in fragment.pending.items()
        if (rounds := fragment.rounds_behind(delta.item.base_version, policy.inner_step_count)) > policy.max_staleness
    )


def _newest_deltas(state: RunState, fragment: FragmentState) -> dict[str, AcceptedItem]:
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
    before = _newest_deltas(state, fragment)
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


def _outliers(state: RunState, fragment: FragmentState, deltas: Sequence[DeltaState]) -> tuple[Decided, ...]:
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


def _closed(
    state: RunState,
    policy: Policy,
    fragment: FragmentState,
    view: MembershipView,
    deltas: Sequence[DeltaState],
    *,
    attempt: int,
    decided: tuple[Decided, ...],
) -> ClosedItem:
    """Returns the entry that freezes these deltas for the fragment's next version, with participation and length.

    Each has its damped weight w' f and its staleness in versions. Staleness damps by rounds and not by versions: where
    learners are merged one by one each makes a version, and an answer that took a moment is not stale for that. A
    learner's deltas together count for its bound at most. Without deltas the round is void. A working learner that
    brings nothing counts with what it brought last, and before its first delta with the steps that it reports, at the
    contributors' mean weight for a round.
    """
    items = [delta.item for delta in deltas]
    full = policy.inner_step_count
    working = _working_learners(state, fragment, view)
    bounds = _bounds(fragment, working, items, policy)
    brought = defaultdict[str, float](float)
    for item in items:
        brought[item.learner] += _weight(item, policy)
    shares = {name: min(1.0, bounds[name] / weight) if weight else 1.0 for name, weight in brought.items()}
    weights = [_weight(item, policy) * shares[item.learner] for item in items]
    dampings = [staleness_damping(fragment.rounds_behind(item.base_version, full)) for item in items]
    damped = [weight * damping for weight, damping in zip(weights, dampings, strict=True)]
    step_counts = [item.step_count for item in items]
    length = round_length(step_counts, damped, inner_step_count=full)

    def absent(contributed: Sequence[float]) -> list[float]:
        mean = math.fsum(contributed) / max(len(brought), 1)
        return [
            min(fragment.weights[name], bounds[name]) * fragment.speeds[name]
            if name in fragment.weights
            else mean * relative_speed(view.of(name).report.step_count, length)  # before its first delta
            for name in sorted(working - brought.keys())
        ]

    def participating(contributed: Sequence[float]) -> float:
        return participation(map(Contribution, contributed, dampings), absent(contributed))

    trained = Counter[str]()
    for item in items:
        trained[item.learner] += item.step_count
    taken = length * participating(weights)
    weights = [
        weight * relative_speed(trained[item.learner], state.steps_since_work(fragment, item.learner) + taken)
        for weight, item in zip(weights, items, strict=True)
    ]
    members = tuple(
        Member(item.delta, weight * damping, fragment.version - item.base_version)
        for item, weight, damping in zip(items, weights, dampings, strict=True)
    )
    after_outage = outage_length(
        step_counts,
        [member.weight for member in members],
        [fragment.missed_step_count(item.learner) for item in items],
        working_weight=math.fsum((*weights, *absent(weights))),
        inner_step_count=full,
    )
    return ClosedItem(
        fragment=fragment.layout.name,
        version=fragment.version + 1,
        attempt=attempt,
        members=members,
        participation=participating(weights),
        decided=decided,
        length=after_outage or length,
    )


def _working_learners(state: RunState, fragment: FragmentState, view: MembershipView) -> set[str]:
    """Returns the learners whose absence from a round of `fragment` lowers its participation.

    A learner counts as working until the run has gone on for `ABSENT_AFTER_ROUNDS` without a delta of it. So a dead
    learner damps the others' steps for a round or two, and not until its lease expires. Attaching again does not count
    as work.
    """
    horizon = ABSENT_AFTER_ROUNDS * state.policy.inner_step_count
    working = set()
    for name in present_learners(state, fragment, view):
        known, since = state.learners[name], fragment.contributed_at.get(name, -math.inf)
        if not known.was_back:
            since = max(since, known.attached_at_step)
        if fragment.newest.step_count < horizon + since:
            working.add(name)
    return working


def _bounds(
    fragment: FragmentState, working: Iterable[str], items: Sequence[AcceptedItem], policy: Policy
) -> dict[str, float]:
    """Returns what each working learner counts for at most in a round of these deltas.

    Its peers count with what they bring to the round, or brought last if that is more.
    """
    known = fragment.weights
    brought = {name: known[name] for name in working if name in known}
    for item in items:
        last = brought.get(item.learner, known.get(item.learner, 0.0))
        brought[item.learner] = max(last, _weight(item, policy))
    return believed_bounds(brought)


def _weight(item: AcceptedItem, policy: Policy) -> float:
    return delta_weight(item.token_count, item.step_count, inner_step_count=policy.inner_step_count)


def closed_without(state: RunState, view: MembershipView, closing: ClosedItem, delta: str) -> ClosedItem | None:
    """Returns the item that freezes a set again without an unreadable delta; None if that is not one of the set.

    It goes by the policy that the set was first closed under, as the merge does.
    """
    members = [member.delta for member in closing.members]
    if delta not in members:
        return None
    fragment = state.fragments[closing.fragment]
    return _closed(
        state,
        fragment.closing_policy or state.policy,
        fragment,
        view,
        [state.deltas[member] for member in members if member != delta],
        attempt=closing.attempt + 1,
        decided=(Decided(delta, Fate.QUARANTINED, "its stored parts can't be read"),),
    )
