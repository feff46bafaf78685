"""The fold of a run log: what each entry does to the state of a run.

It is a pure function: no I/O, no clock, no randomness. Every replica, the verifier and every reader run this code over
the same entries, so they agree. An item that is not admissible at its place in the log (a close of a round that another
replica closed one entry earlier, a second delta from one base) is *rejected*: it stays in the log and has no effect.
Therefore a writer that lost a number to another may append the same items at the next number, and learns from the fold
whether they took effect.

    AcceptedItem  --> pending --(in a ClosedItem's members, then CommittedItem)--> merged
                         |-----(newer session's delta for the fragment)--> superseded
                         |-----(named by a close, a fate item, a roll-back, the run's end)--> expired, quarantined
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, assert_never

from skerry.algorithm.merge import with_step
from skerry.algorithm.rounds import delta_weight, share_of_length
from skerry_syncer.store.errors import LogCorruptError
from skerry_syncer.store.log.checks import check_item
from skerry_syncer.store.log.entries import (
    INITIAL_BASE,
    AcceptedItem,
    CheckpointItem,
    ClosedItem,
    CollectedItem,
    CommittedItem,
    Decided,
    Entry,
    Fate,
    FateItem,
    Item,
    LeftItem,
    PolicyItem,
    RollbackItem,
    RunStatus,
    SessionItem,
    SnapshotItem,
    StatusItem,
    bytes_digest,
)
from skerry_syncer.store.log.horizon import forget
from skerry_syncer.store.log.state import (
    REMEMBERED_CLOSES,
    CommitRecord,
    DeltaState,
    FragmentState,
    LearnerState,
    Outcome,
    RunState,
    VersionState,
)


def apply_entry(state: RunState, entry: Entry, data: bytes) -> tuple[Outcome, ...]:
    """Applies the next entry, whose bytes are `data`, and returns what became of each of its items.

    Raises:
        LogCorruptError: not this run's next entry; nothing was applied.
    """
    if entry.run_uid != state.spec.uid or entry.position != state.position + 1 or entry.previous != state.head_digest:
        raise LogCorruptError(
            "log entry does not follow its predecessor. "
            f"run={state.spec.name}, position={state.position + 1}, entry_position={entry.position}, "
            f"expected_previous={state.head_digest}, actual_previous={entry.previous}"
        )
    state.position = entry.position
    state.head_digest = bytes_digest(data)
    state.age_s = max(state.age_s, entry.age_s)
    return tuple(_apply_item(state, item) for item in entry.items)


def _apply_item(state: RunState, item: Item) -> Outcome:
    rejection = check_item(state, item)
    if rejection is not None:
        return Outcome(item, rejection)
    decided = tuple(_admit(state, item))
    for delta in decided:
        if (learner := state.learners.get(delta.item.learner)) is not None:  # none of a draft's initial weights
            counts = learner.fates.setdefault(delta.fate, {})
            counts[delta.short_reason] = counts.get(delta.short_reason, 0) + 1
    return Outcome(item, None, decided)


def _admit(state: RunState, item: Item) -> list[DeltaState]:  # noqa: C901, PLR0912 - one branch a kind of item
    match item:
        case AcceptedItem():
            return _admit_accepted(state, item)
        case SessionItem():
            _admit_session(state, item)
        case LeftItem():
            state.learners[item.learner].has_left = True
        case ClosedItem():
            return _admit_closed(state, item)
        case CommittedItem():
            return _admit_committed(state, item)
        case FateItem():
            return _decide(state, item.decided)
        case PolicyItem():
            state.policy = item.policy
            state.requests[item.request_id] = state.position
        case SnapshotItem():
            return _admit_snapshot(state, item)
        case RollbackItem():
            return _admit_rollback(state, item)
        case CollectedItem():
            state.condemned_at.update(dict.fromkeys(item.names, state.position))
        case StatusItem():
            return _admit_status(state, item)
        case CheckpointItem():
            state.checkpoint_at = item.at
            forget(state, item)
        case _:
            assert_never(item)
    return []


def _admit_session(state: RunState, item: SessionItem) -> None:
    learner = state.learners.setdefault(item.learner, LearnerState(item.learner, item.region, item.session))
    learner.region, learner.session, learner.has_left = item.region, item.session, False
    if item.session not in learner.sessions:  # a known session attaching again is no new work
        learner.sessions.append(item.session)
        learner.attached_at, learner.attached_at_step = state.position, state.step_count


def _admit_accepted(state: RunState, item: AcceptedItem) -> list[DeltaState]:
    fragment = state.fragments[item.fragment]
    superseded = [
        Decided(other.item.delta, Fate.SUPERSEDED, "a newer session of the learner sent its own")
        for other in fragment.pending.values()
        if other.item.learner == item.learner and other.item.session != item.session
    ]
    decided = _decide(state, superseded)
    delta = DeltaState(item, state.position)
    state.deltas[item.delta] = delta
    fragment.pending[item.delta] = delta
    state.bases[(item.session, item.fragment, item.base_version)] = item.delta
    learner = state.learners.get(item.learner)
    if learner is not None:
        learner.step_count += item.step_count
        learner.last_deltas[item.fragment] = item.delta
    return decided


def _admit_closed(state: RunState, item: ClosedItem) -> list[DeltaState]:
    fragment = state.fragments[item.fragment]
    is_new_round = fragment.closing is None
    _thaw(state, fragment)  # a set that is closed again: its deltas are pending until this item decides
    decided = _decide(state, item.decided)
    for member in item.members:
        delta = fragment.pending.pop(member.delta)
        delta.weight, delta.staleness = member.weight, member.staleness
    fragment.closing = item if item.members else None
    fragment.last_close_position = state.position
    fragment.next_attempt = item.attempt + 1
    if is_new_round:
        fragment.closing_policy = state.policy
        contributors = frozenset(state.deltas[m.delta].item.learner for m in item.members)
        fragment.close_positions = (*fragment.close_positions, state.position)[-REMEMBERED_CLOSES:]
        fragment.contributors = (*fragment.contributors, contributors)[-REMEMBERED_CLOSES:]
    return decided


def _thaw(state: RunState, fragment: FragmentState) -> None:
    """Makes the deltas of the frozen set pending again."""
    if fragment.closing is not None:
        fragment.pending.update((member.delta, state.deltas[member.delta]) for member in fragment.closing.members)
        fragment.closing = None


def _add_version(state: RunState, fragment: FragmentState, number: int, digest: str, **content: Any) -> VersionState:
    """Returns the fragment's next version, which is its newest from here on."""
    if fragment.version != INITIAL_BASE:
        fragment.newest.until = state.position
    fragment.version, fragment.next_attempt = number, 0
    version = VersionState(number, digest, state.position, made_at_age_s=state.age_s, **content)
    fragment.versions[number] = version
    return version


def _admit_committed(state: RunState, item: CommittedItem) -> list[DeltaState]:
    fragment = state.fragments[item.fragment]
    close = fragment.closing
    assert close is not None  # `check` admitted the item
    fragment.closing = None
    step_count = fragment.newest.step_count + close.participation * close.length
    record = CommitRecord(close, item)
    newest = _add_version(state, fragment, item.version, item.digest, step_count=step_count, commit=record)
    policy = fragment.closing_policy or state.policy
    merged = [state.deltas[member.delta] for member in close.members]
    weights = [
        share_of_length(m.weight, d.item.step_count, close.length) for m, d in zip(close.members, merged, strict=True)
    ]
    total = sum(weights)
    for delta, weight in zip(merged, weights, strict=True):
        delta.fate, delta.version = Fate.MERGED, item.version
        delta.weight_share = weight / total if total > 0 else 0.0
        pace = fragment.paces.get(delta.item.learner, ())
        fragment.paces[delta.item.learner] = with_step(pace, delta.item.last_step, delta.item.norm_a_step)
        fragment.step_counts[delta.item.learner] = delta.item.step_count
        fragment.weights[delta.item.learner] = delta_weight(
            delta.item.token_count,
            delta.item.step_count,
            inner_step_count=policy.inner_step_count,
            weight_cap=policy.weight_cap,
        )
        fragment.contributed_at[delta.item.learner] = newest.step_count
        # The step count up to which the delta trained. Its merge may be much later, if the delta arrived late.
        reached = fragment.versions[delta.item.base_version].step_count + delta.item.step_count
        fragment.worked_until[delta.item.learner] = min(newest.step_count, reached)
    return merged


def _admit_snapshot(state: RunState, item: SnapshotItem) -> list[DeltaState]:
    fragment = state.fragments[item.fragment]
    if fragment.version != INITIAL_BASE:
        version = fragment.versions[item.version]
        version.weights, version.outer = item.weights, item.outer
        return []
    _add_version(state, fragment, 0, item.digest, weights=item.weights, outer=item.outer)
    initial = list(fragment.pending.values())
    fragment.pending.clear()
    for delta in initial:  # the snapshot was made of the first push; others of the same fragment expire
        is_source = delta is initial[0]
        delta.fate = Fate.MERGED if is_source else Fate.EXPIRED
        delta.reason = "" if is_source else "another push brought the initial weights"
    return initial


def _admit_rollback(state: RunState, item: RollbackItem) -> list[DeltaState]:
    state.requests[item.request_id] = state.position
    decided: list[DeltaState] = []
    for target in item.fragments:
        fragment = state.fragments[target.fragment]
        _thaw(state, fragment)
        decided += _decide(state, [Decided(name, Fate.EXPIRED, "the run was rolled back") for name in fragment.pending])
        source = fragment.versions[target.source_version]
        for version in fragment.versions.values():
            version.is_abandoned |= version.version > source.version
        fragment.momentum_from = source.step_count
        fragment.paces.clear()
        fragment.contributed_at.clear()
        fragment.worked_until.clear()
        _add_version(
            state,
            fragment,
            target.version,
            target.digest,
            step_count=source.step_count,
            weights=target.weights,
            outer=target.outer,
            source_version=source.version,
        )
    return decided


def _admit_status(state: RunState, item: StatusItem) -> list[DeltaState]:
    state.status = item.status
    if item.status is not RunStatus.CLOSED:
        return []
    left = [name for fragment in state.fragments.values() for name in fragment.pending]
    return _decide(state, [Decided(name, Fate.EXPIRED, "the run was closed") for name in left])


def _decide(state: RunState, decided: Iterable[Decided]) -> list[DeltaState]:
    result = []
    for decision in decided:
        delta = state.deltas[decision.delta]
        del state.fragments[delta.item.fragment].pending[decision.delta]
        delta.fate, delta.reason = decision.fate, decision.reason
        result.append(delta)
    return result
