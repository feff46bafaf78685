"""The fold of a run log: what each entry does to the state of a run.

It is a pure function: no I/O, no clock, no randomness. Every replica, the verifier and every reader run this code over
the same entries, so they agree. An item that is not admissible at its place in the log (a close of a round that another
replica closed one entry earlier, a second delta from one base) is *rejected*: it stays in the log and has no effect.
Therefore a writer that lost a number to another may append the same items at the next number, and learns from the fold
whether they took effect.

Of each kind of item, `check_…` says why it is rejected, and `_apply_…` does what it does if it is not.

    AcceptedItem  --> pending --(in a ClosedItem's members, then CommittedItem)--> merged
                         |-----(newer session's delta for the fragment)--> superseded
                         |-----(a close, a fate item, a roll-back, an ejection, the run's end)--> expired, quarantined
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from skerry.algorithm.merge import with_step
from skerry.algorithm.rounds import ABSENT_AFTER_ROUNDS, believed_bounds, delta_weight, relative_speed
from skerry_syncer.store.errors import LogCorruptError
from skerry_syncer.store.log.entries import (
    INITIAL_BASE,
    AcceptedItem,
    CheckpointItem,
    ClosedItem,
    CollectedItem,
    CommittedItem,
    Decided,
    EjectionItem,
    Entry,
    Fate,
    FateItem,
    Item,
    LeftItem,
    MetricsItem,
    PolicyItem,
    RollbackItem,
    RunStatus,
    SessionItem,
    SnapshotItem,
    StatusItem,
    bytes_digest,
)
from skerry_syncer.store.log.judging import abandon_reports, apply_metrics, check_metrics
from skerry_syncer.store.log.retention import forget, has_weights_at, pinned_names
from skerry_syncer.store.log.state import (
    REMEMBERED_CLOSES,
    CommitRecord,
    Contribution,
    DeltaState,
    FragmentState,
    LearnerState,
    Outcome,
    Rejection,
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


def check_item(state: RunState, item: Item) -> Rejection | None:
    """Returns why `item` would be rejected as the next item of the log, or None."""
    unknown = [name for name in _named_fragments(item) if name not in state.fragments]
    if unknown:
        return Rejection("FRAGMENT_NOT_FOUND", f"run has no such fragment. fragments={unknown}")
    check, _ = RULES[type(item)]
    return check(state, item)


def _named_fragments(item: Item) -> tuple[str, ...]:
    match item:
        case AcceptedItem() | ClosedItem() | CommittedItem() | SnapshotItem():
            return (item.fragment,)
        case RollbackItem():
            return tuple(target.fragment for target in item.fragments)
        case CheckpointItem():
            return tuple(item.oldest)
        case _:
            return ()


def _apply_item(state: RunState, item: Item) -> Outcome:
    rejection = check_item(state, item)
    if rejection is not None:
        return Outcome(item, rejection)
    _, apply = RULES[type(item)]
    decided = tuple(apply(state, item) or ())
    for delta in decided:
        if (learner := state.learners.get(delta.item.learner)) is not None:  # none of a draft's initial weights
            counts = learner.fates.setdefault(delta.fate, {})
            counts[delta.short_reason] = counts.get(delta.short_reason, 0) + 1
    return Outcome(item, None, decided)


def check_session(state: RunState, item: SessionItem) -> Rejection | None:
    """A session that was fenced never comes back."""
    learner = state.learners.get(item.learner)
    if state.status is not RunStatus.OPEN or learner is None:
        return check_open(state)
    if (rejection := check_ejected(state, item.learner)) is not None:
        return rejection
    if item.session in learner.sessions and learner.session != item.session:
        return Rejection("SESSION_FENCED", f"a newer session of this learner attached. learner={item.learner}")
    if learner.session == item.session and not learner.has_left:
        return Rejection("REPEATED", f"session is attached. learner={item.learner}")
    return None


def _apply_session(state: RunState, item: SessionItem) -> None:
    learner = state.learners.setdefault(item.learner, LearnerState(item.learner, item.region, item.session))
    learner.region, learner.session, learner.has_left = item.region, item.session, False
    learner.organisation = item.organisation
    if item.session not in learner.sessions:  # a known session attaching again is no new work
        learner.sessions.append(item.session)
        learner.attached_at, learner.attached_at_step = state.position, state.step_count


def check_open(state: RunState) -> Rejection | None:
    """Only an open run takes learners and their deltas."""
    if state.status is RunStatus.OPEN:
        return None
    reason = "RUN_DRAFT" if state.status is RunStatus.DRAFT else "RUN_CLOSED"
    return Rejection(reason, f"run takes no learners and no deltas. status={state.status}")


def check_ejected(state: RunState, learner: str) -> Rejection | None:
    """An ejected learner takes no part until it is readmitted."""
    known = state.learners.get(learner)
    if known is None or not known.ejected_at:
        return None
    readmit = f"an admin can readmit it by `skerry runs readmit {state.spec.name} {learner}`"
    facts = f"learner={learner}, position={known.ejected_at}"
    return Rejection("EJECTED", f"the learner was ejected from the run; {readmit}. {facts}")


def check_left(state: RunState, item: LeftItem) -> Rejection | None:
    """A learner can leave once, and only by its live session."""
    learner = state.learners.get(item.learner)
    if learner is None or learner.session != item.session or learner.has_left:
        return Rejection("SESSION_FENCED", f"not the learner's live session. learner={item.learner}")
    return None


def _apply_left(state: RunState, item: LeftItem) -> None:
    state.learners[item.learner].has_left = True


def check_accepted(state: RunState, item: AcceptedItem) -> Rejection | None:
    """A delta is accepted once, from a base that exists, in its learner's live session."""
    known = state.deltas.get(item.delta)
    if known is not None:
        same = (known.item.digest, known.item.fragment) == (item.digest, item.fragment)
        return Rejection("REPEATED" if same else "ID_REUSED", f"delta id was accepted before. delta={item.delta}")
    if state.are_condemned(item.parts):
        return Rejection("INCOMPLETE", "parts were collected meanwhile; send them again")
    return check_push(state, item)


def check_push(state: RunState, item: AcceptedItem) -> Rejection | None:
    """Returns why a push would be refused before its parts are known, or None; an accepted delta is not refused."""
    if item.delta in state.deltas:
        return None
    if item.base_version == INITIAL_BASE:
        return check_initial(state, item.session, item.fragment)
    return (
        check_open(state)
        or check_live(state, item.learner, item.session)
        or check_base(state, state.fragments[item.fragment], item.base_version, item.base_digest)
        or check_repeated_base(state, item.session, item.fragment, item.base_version)
    )


def check_initial(state: RunState, session: str, fragment: str) -> Rejection | None:
    """Initial weights are accepted while the run is a draft and the fragment has none."""
    if state.status is not RunStatus.DRAFT:
        return Rejection("RUN_EXISTS", "run has its initial weights")
    if state.fragments[fragment].version != INITIAL_BASE:
        other = state.bases.get((session, fragment, INITIAL_BASE))
        return Rejection("BASE_REPEATED", f"fragment has its initial weights. fragment={fragment}, delta={other}")
    return None


def check_live(state: RunState, learner_id: str, session: str) -> Rejection | None:
    """A push needs the newest session of its learner, which is not ejected."""
    if (rejection := check_ejected(state, learner_id)) is not None:
        return rejection
    learner = state.learners.get(learner_id)
    if learner is None or session not in learner.sessions:
        return Rejection("SESSION_UNKNOWN", f"session never attached. learner={learner_id}")
    if learner.session != session:
        return Rejection("SESSION_FENCED", f"a newer session of this learner attached. learner={learner_id}")
    return None


def check_base(state: RunState, fragment: FragmentState, version: int, digest: str) -> Rejection | None:
    """A base version exists, has that digest, was not abandoned and is not too old."""
    if version > fragment.version:
        return Rejection("BASE_FUTURE", f"base version does not exist yet. base={version}, newest={fragment.version}")
    if 0 <= version < fragment.oldest:
        return Rejection("BASE_STALE", f"base version is forgotten. base={version}, oldest={fragment.oldest}")
    base = fragment.versions.get(version)
    if base is None:
        return Rejection("BASE_FOREIGN", f"base version never existed. base={version}")
    if base.digest != digest:
        # Without the right digest, which a client that has not pulled the base must not learn.
        return Rejection("BASE_FOREIGN", f"base digest differs. base={version}, actual={digest}")
    if base.is_abandoned:
        return Rejection("BASE_STALE", f"base version was rolled back. base={version}, newest={fragment.version}")
    staleness = fragment.rounds_behind(version, state.policy.inner_step_count)
    if staleness > state.policy.max_staleness:
        return Rejection(
            "BASE_STALE",
            f"base version is too old. base={version}, newest={fragment.version}, staleness={staleness}, "
            f"allowed={state.policy.max_staleness}",
        )
    return None


def check_repeated_base(state: RunState, session: str, fragment: str, base_version: int) -> Rejection | None:
    """At most one delta of a session from one base version is pending or merged.

    A delta that is expired, superseded or quarantined does not count. Otherwise a fragment would stop if every learner
    lost its delta.
    """
    other = state.bases.get((session, fragment, base_version))
    if other is None or state.deltas[other].fate not in (Fate.PENDING, Fate.MERGED):
        return None
    facts = f"base={base_version}, delta={other}"
    return Rejection("BASE_REPEATED", f"session has an accepted delta from that base. {facts}")


def _apply_accepted(state: RunState, item: AcceptedItem) -> list[DeltaState]:
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


def check_closed(state: RunState, item: ClosedItem) -> Rejection | None:
    """A close is the next one of its fragment and names pending deltas; a repeated close names every frozen one.

    A repeated close may have no members left. It voids the round, and the next close of the version takes the next
    attempt, so that a late commit of the voided set is never mistaken for the commit of another set.
    """
    fragment = state.fragments[item.fragment]
    closing = fragment.closing
    expected = (fragment.version + 1, fragment.next_attempt)
    if closing is not None:
        expected = (closing.version, closing.attempt + 1)
    if (item.version, item.attempt) != expected or state.status not in (RunStatus.OPEN, RunStatus.CLOSING):
        return Rejection("VERSION_NOT_FOUND", f"not the next close. expected={expected}")
    frozen = {member.delta for member in closing.members} if closing is not None else set()
    members = [member.delta for member in item.members]
    named = {*members, *(decided.delta for decided in item.decided)}
    if not members and closing is None:
        return Rejection("BAD_REQUEST", "a round has no members")
    if len(named) < len(item.members) + len(item.decided) or not are_fates(item.decided):
        return Rejection("BAD_REQUEST", "a delta is named twice, or its fate is not one that a decision can give")
    if not frozen <= named <= fragment.pending.keys() | frozen:
        return Rejection("BAD_REQUEST", "a delta is not pending in this fragment, or a frozen one is not named")
    return None


def _apply_closed(state: RunState, item: ClosedItem) -> list[DeltaState]:
    fragment = state.fragments[item.fragment]
    is_new_round = fragment.closing is None
    _unfreeze(state, fragment)  # a set that is closed again: its deltas are pending until this item decides
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


def _unfreeze(state: RunState, fragment: FragmentState) -> None:
    """Makes the deltas of the frozen set pending again."""
    if fragment.closing is not None:
        undecided = fragment.pending.keys() | {member.delta for member in fragment.closing.members}
        fragment.pending = {name: delta for name, delta in state.deltas.items() if name in undecided}
        fragment.closing = None


def check_committed(state: RunState, item: CommittedItem) -> Rejection | None:
    """A commit must be of the frozen set that waits for a merge; of several replicas' commits the first counts."""
    closing = state.fragments[item.fragment].closing
    if closing is None or (closing.version, closing.attempt) != (item.version, item.attempt):
        return Rejection("VERSION_NOT_FOUND", f"no such round waits for a merge. version={item.version}")
    if state.are_condemned(item.update):
        return Rejection("INCOMPLETE", "the update's objects were collected; write them anew")
    return None


def _apply_committed(state: RunState, item: CommittedItem) -> list[DeltaState]:
    fragment = state.fragments[item.fragment]
    close = fragment.closing
    assert close is not None  # `check` admitted the item
    fragment.closing = None
    merged = [state.deltas[member.delta] for member in close.members]
    policy = fragment.closing_policy or state.policy
    token_count = _token_count(state, fragment, [delta.item for delta in merged], policy.inner_step_count)
    newest = _add_version(
        state,
        fragment,
        item.version,
        item.digest,
        step_count=fragment.newest.step_count + close.participation * close.length,
        token_count=fragment.newest.token_count + token_count,
        commit=CommitRecord(close, item),
    )
    total = sum(member.weight for member in close.members)
    trained = Counter[str]()
    for delta in merged:
        trained[delta.item.learner] += delta.item.step_count
    speeds = {name: relative_speed(count, state.steps_since_work(fragment, name)) for name, count in trained.items()}
    for delta, member in zip(merged, close.members, strict=True):
        learner = delta.item.learner
        delta.fate, delta.version = Fate.MERGED, item.version
        delta.weight_share = member.weight / total if total > 0 else 0.0
        fragment.paces[learner] = with_step(
            fragment.paces.get(learner, ()), delta.item.last_step, delta.item.norm_a_step
        )
        fragment.weights[learner] = delta_weight(
            delta.item.token_count, delta.item.step_count, inner_step_count=policy.inner_step_count
        )
        fragment.speeds[learner] = speeds[learner]
        fragment.contributed_at[learner] = newest.step_count
        # The step count up to which the delta trained. Its merge may be much later, if the delta arrived late.
        reached = fragment.versions[delta.item.base_version].step_count + delta.item.step_count
        fragment.worked_until[learner] = min(newest.step_count, reached)
    newest.contributions = _contributions(state, fragment.versions[item.version - 1], merged)
    return merged


def _contributions(state: RunState, before: VersionState, merged: Iterable[DeltaState]) -> tuple[Contribution, ...]:
    """Returns the contributions to the version that these deltas took `before` to."""
    rows = {(row.learner, row.organisation): row for row in before.contributions}
    counts = {key: row.version_count for key, row in rows.items()}
    for delta in merged:
        learner = delta.item.learner
        organisation = state.learners[learner].organisation
        for key in ((learner, organisation), ("", organisation)):
            row = rows.get(key, Contribution(*key))
            rows[key] = row._replace(
                token_count=row.token_count + delta.item.token_count,
                step_count=row.step_count + delta.item.step_count,
                weight=row.weight + delta.weight_share,
                version_count=counts.get(key, 0) + 1,
            )
    return tuple(rows.values())


def _token_count(state: RunState, fragment: FragmentState, items: Sequence[AcceptedItem], full: int) -> float:
    """Returns by how many tokens a round of these deltas takes the run on; a delta of a full round has `full` steps.

    A learner whose tokens are doubted counts with what is believed. It is held against those who worked lately.
    """
    oldest = fragment.newest.step_count - ABSENT_AFTER_ROUNDS * full
    brought = {
        name: weight
        for name, weight in fragment.weights.items()
        if not state.learners[name].has_left and fragment.contributed_at[name] >= oldest
    }
    for item in items:
        weight = delta_weight(item.token_count, item.step_count, inner_step_count=full)
        brought[item.learner] = max(brought.get(item.learner, 0.0), weight)
    bounds = believed_bounds(brought)
    return math.fsum(min(item.token_count, bounds[item.learner]) for item in items)


def _add_version(state: RunState, fragment: FragmentState, number: int, digest: str, **content: Any) -> VersionState:
    """Returns the fragment's next version, which is its newest from here on."""
    if fragment.version != INITIAL_BASE:
        fragment.newest.until = state.position
    fragment.version, fragment.next_attempt = number, 0
    version = VersionState(number, digest, state.position, made_at_age_s=state.age_s, **content)
    fragment.versions[number] = version
    return version


def check_fates(state: RunState, item: FateItem) -> Rejection | None:
    """Only pending deltas get a fate, each of them one."""
    if len({decided.delta for decided in item.decided}) < len(item.decided) or not are_fates(item.decided):
        return Rejection("BAD_REQUEST", "a delta is named twice, or its fate is not one that a decision can give")
    pending = {name for fragment in state.fragments.values() for name in fragment.pending}
    if gone := sorted({decided.delta for decided in item.decided} - pending):
        return Rejection("BAD_REQUEST", f"deltas are not pending. deltas={gone[:20]}")
    return None


def are_fates(decided: Iterable[Decided]) -> bool:
    """Whether every fate is final and no merge."""
    return all(each.fate in (Fate.SUPERSEDED, Fate.EXPIRED, Fate.QUARANTINED) for each in decided)


def _apply_fates(state: RunState, item: FateItem) -> list[DeltaState]:
    return _decide(state, item.decided)


def _decide(state: RunState, decided: Iterable[Decided]) -> list[DeltaState]:
    result = []
    for decision in decided:
        delta = state.deltas[decision.delta]
        del state.fragments[delta.item.fragment].pending[decision.delta]
        delta.fate, delta.reason = decision.fate, decision.reason
        result.append(delta)
    return result


def check_policy(state: RunState, item: PolicyItem) -> Rejection | None:
    """A policy request takes effect once, while the run is alive; what it pins must be there."""
    if item.request_id in state.requests:
        return Rejection("ID_REUSED", "request was applied before")
    if state.status in (RunStatus.CLOSING, RunStatus.CLOSED):
        return Rejection("RUN_CLOSED", f"run takes no policy any more. status={state.status}")
    pins = set(item.policy.pinned_positions).difference(state.policy.pinned_positions)
    if gone := sorted(position for position in pins if not has_weights_at(state, position)):
        return Rejection("VERSION_NOT_FOUND", f"weights at a position are not there to pin. positions={gone[:20]}")
    return None


def _apply_policy(state: RunState, item: PolicyItem) -> None:
    if item.policy.gate != state.policy.gate:
        state.asked_rollback = None
    state.policy = item.policy
    state.requests[item.request_id] = state.position


def check_snapshot(state: RunState, item: SnapshotItem) -> Rejection | None:
    """A version has at most one snapshot; version 0 of a draft exists by it."""
    fragment = state.fragments[item.fragment]
    if state.are_condemned((*item.weights, *item.outer)):
        return Rejection("INCOMPLETE", "the snapshot's objects were collected")
    if item.version == 0 and fragment.version == INITIAL_BASE:
        return None if state.status is RunStatus.DRAFT else Rejection("RUN_EXISTS", "run has its initial weights")
    version = fragment.versions.get(item.version)
    is_known = version is not None and version.version >= fragment.oldest and version.digest == item.digest
    if version is None or not is_known or version.is_abandoned or version.weights:
        return Rejection("VERSION_NOT_FOUND", f"no version wants this snapshot. version={item.version}")
    return None


def _apply_snapshot(state: RunState, item: SnapshotItem) -> list[DeltaState]:
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


def check_rollback(state: RunState, item: RollbackItem) -> Rejection | None:
    """A roll-back takes effect once, and only if no fragment has a newer version than when it was prepared."""
    if item.request_id in state.requests:
        return Rejection("ID_REUSED", "request was applied before")
    if state.status not in (RunStatus.OPEN, RunStatus.CLOSING):
        return Rejection("RUN_CLOSED", f"run is not open. status={state.status}")
    if len(set(_named_fragments(item))) != len(item.fragments):
        return Rejection("BAD_REQUEST", "a fragment is rolled back twice")
    for target in item.fragments:
        fragment = state.fragments[target.fragment]
        source = fragment.versions.get(target.source_version)
        if target.version != fragment.version + 1 or source is None or source.digest != target.digest:
            facts = f"fragment={target.fragment}, version={target.version}, source_version={target.source_version}"
            return Rejection("VERSION_NOT_FOUND", f"fragment has a newer version, or another source. {facts}")
        if state.are_condemned((*target.weights, *target.outer)):
            return Rejection("INCOMPLETE", "the roll-back's objects were collected")
    return None


def _apply_rollback(state: RunState, item: RollbackItem) -> list[DeltaState]:
    state.requests[item.request_id] = state.position
    decided: list[DeltaState] = []
    for target in item.fragments:
        fragment = state.fragments[target.fragment]
        _unfreeze(state, fragment)
        decided += _decide(state, [Decided(name, Fate.EXPIRED, "the run was rolled back") for name in fragment.pending])
        source = fragment.versions[target.source_version]
        for version in fragment.versions.values():
            version.is_abandoned |= version.version > source.version
        fragment.momentum_from = source.step_count
        fragment.paces.clear()
        fragment.contributed_at = dict.fromkeys(fragment.contributed_at, source.step_count)
        fragment.worked_until.clear()
        _add_version(
            state,
            fragment,
            target.version,
            target.digest,
            step_count=source.step_count,
            token_count=source.token_count,
            contributions=source.contributions,
            weights=target.weights,
            outer=target.outer,
            source_version=source.version,
        )
    for learner in state.learners.values():
        learner.attached_at_step = min(learner.attached_at_step, state.step_count)
    abandon_reports(state, item.target_position)
    return decided


def check_ejection(state: RunState, item: EjectionItem) -> Rejection | None:
    """Only a learner that attached once is ejected, and only one that is ejected is readmitted."""
    if item.request_id in state.requests:
        return Rejection("ID_REUSED", "request was applied before")
    known = state.learners.get(item.learner)
    if known is None:
        names = ", ".join(sorted(state.learners)[:20])
        return Rejection("LEARNER_NOT_FOUND", f"no such learner ever attached. learner={item.learner}, known={names}")
    if bool(known.ejected_at) == item.is_ejected:
        return Rejection("REPEATED", f"the learner's ejection is as asked. position={known.ejected_at}")
    return None


def _apply_ejection(state: RunState, item: EjectionItem) -> list[DeltaState]:
    state.requests[item.request_id] = state.position
    learner = state.learners[item.learner]
    learner.ejected_at = state.position if item.is_ejected else 0
    if not item.is_ejected:
        return []
    learner.has_left = True
    decided: list[DeltaState] = []
    for fragment in state.fragments.values():
        frozen = fragment.closing.members if fragment.closing is not None else ()
        if any(state.deltas[member.delta].item.learner == item.learner for member in frozen):
            _unfreeze(state, fragment)  # its other deltas wait for the next close, which has the next attempt
        theirs = [name for name, delta in fragment.pending.items() if delta.item.learner == item.learner]
        decided += _decide(state, [Decided(name, Fate.EXPIRED, "its learner was ejected") for name in theirs])
    return decided


def check_collected(state: RunState, item: CollectedItem) -> Rejection | None:
    """Nothing that rebuilding the newest versions or the weights at a pin takes may be condemned."""
    live = state.referenced_names() | pinned_names(state)
    if any(name in live for name in item.names):
        return Rejection("BAD_REQUEST", "a condemned name is referenced")
    return None


def _apply_collected(state: RunState, item: CollectedItem) -> None:
    state.condemned_at.update(dict.fromkeys(item.names, state.position))


def check_status(state: RunState, item: StatusItem) -> Rejection | None:
    """A run goes from draft to open to closing to closed."""
    if list(RunStatus).index(item.status) != list(RunStatus).index(state.status) + 1:
        facts = f"status={state.status}, next={item.status}"
        return Rejection("RUN_CLOSED", f"status can't follow the current one. {facts}")
    if item.status is RunStatus.OPEN and any(f.version == INITIAL_BASE for f in state.fragments.values()):
        return Rejection("RUN_DRAFT", "initial weights are missing")
    if item.status is RunStatus.CLOSED and any(f.closing is not None for f in state.fragments.values()):
        return Rejection("RUN_CLOSED", "a merge is under way")
    return None


def _apply_status(state: RunState, item: StatusItem) -> list[DeltaState]:
    state.status = item.status
    if item.status is not RunStatus.CLOSED:
        return []
    left = [name for fragment in state.fragments.values() for name in fragment.pending]
    return _decide(state, [Decided(name, Fate.EXPIRED, "the run was closed") for name in left])


def check_checkpoint(state: RunState, item: CheckpointItem) -> Rejection | None:
    """A checkpoint is newer than the one before, of an earlier entry, and the run is past its draft."""
    if state.status is RunStatus.DRAFT:
        return Rejection("RUN_DRAFT", "a draft has no checkpoints")
    if not state.checkpoint_at < item.at <= state.position:
        return Rejection("REPEATED", f"not a newer checkpoint. at={item.at}, newest={state.checkpoint_at}")
    return None


def _apply_checkpoint(state: RunState, item: CheckpointItem) -> None:
    state.checkpoint_at = item.at
    forget(state, item)


_Rules = tuple[Callable[[RunState, Any], Rejection | None], Callable[[RunState, Any], list[DeltaState] | None]]
RULES: Final[dict[type[Item], _Rules]] = {
    SessionItem: (check_session, _apply_session),
    LeftItem: (check_left, _apply_left),
    AcceptedItem: (check_accepted, _apply_accepted),
    ClosedItem: (check_closed, _apply_closed),
    CommittedItem: (check_committed, _apply_committed),
    FateItem: (check_fates, _apply_fates),
    PolicyItem: (check_policy, _apply_policy),
    SnapshotItem: (check_snapshot, _apply_snapshot),
    RollbackItem: (check_rollback, _apply_rollback),
    MetricsItem: (check_metrics, apply_metrics),
    EjectionItem: (check_ejection, _apply_ejection),
    CollectedItem: (check_collected, _apply_collected),
    StatusItem: (check_status, _apply_status),
    CheckpointItem: (check_checkpoint, _apply_checkpoint),
}
