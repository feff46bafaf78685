"""Decides which items the fold admits at their place in the log. Nothing here changes the state."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

from skerry_syncer.store.log.entries import (
    INITIAL_BASE,
    AcceptedItem,
    CheckpointItem,
    ClosedItem,
    CollectedItem,
    CommittedItem,
    Decided,
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
)
from skerry_syncer.store.log.retention import has_weights_at, pinned_names
from skerry_syncer.store.log.state import FragmentState, Rejection, RunState


def check_item(state: RunState, item: Item) -> Rejection | None:
    """Returns why `item` would be rejected as the next item of the log, or None."""
    unknown = [name for name in _named_fragments(item) if name not in state.fragments]
    if unknown:
        return Rejection("FRAGMENT_NOT_FOUND", f"run has no such fragment. fragments={unknown}")
    return CHECKS[type(item)](state, item)


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


def check_left(state: RunState, item: LeftItem) -> Rejection | None:
    """A learner can leave once, and only by its live session."""
    learner = state.learners.get(item.learner)
    if learner is None or learner.session != item.session or learner.has_left:
        return Rejection("SESSION_FENCED", f"not the learner's live session. learner={item.learner}")
    return None


def check_committed(state: RunState, item: CommittedItem) -> Rejection | None:
    """A commit must be of the frozen set that waits for a merge; of several replicas' commits the first counts."""
    closing = state.fragments[item.fragment].closing
    if closing is None or (closing.version, closing.attempt) != (item.version, item.attempt):
        return Rejection("VERSION_NOT_FOUND", f"no such round waits for a merge. version={item.version}")
    if state.are_condemned(item.update):
        return Rejection("INCOMPLETE", "the update's objects were collected; write them anew")
    return None


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


def check_collected(state: RunState, item: CollectedItem) -> Rejection | None:
    """Nothing that rebuilding the newest versions or the weights at a pin takes may be condemned."""
    live = state.referenced_names() | pinned_names(state)
    if any(name in live for name in item.names):
        return Rejection("BAD_REQUEST", "a condemned name is referenced")
    return None


def check_accepted(state: RunState, item: AcceptedItem) -> Rejection | None:
    """A delta is accepted once, from a base that exists, in its learner's live session."""
    known = state.delta(item.delta)
    if known is not None:
        same = (known.item.digest, known.item.fragment) == (item.digest, item.fragment)
        return Rejection("REPEATED" if same else "ID_REUSED", f"delta id was accepted before. delta={item.delta}")
    if state.are_condemned(item.parts):
        return Rejection("INCOMPLETE", "parts were collected meanwhile; send them again")
    return check_push(state, item)


def check_initial(state: RunState, session: str, fragment: str) -> Rejection | None:
    """Initial weights are accepted while the run is a draft and the fragment has none."""
    if state.status is not RunStatus.DRAFT:
        return Rejection("RUN_EXISTS", "run has its initial weights")
    if state.fragments[fragment].version != INITIAL_BASE:
        other = state.bases.get((session, fragment, INITIAL_BASE))
        return Rejection("BASE_REPEATED", f"fragment has its initial weights. fragment={fragment}, delta={other}")
    return None


def check_open(state: RunState) -> Rejection | None:
    """Only an open run takes learners and their deltas."""
    if state.status is RunStatus.OPEN:
        return None
    reason = "RUN_DRAFT" if state.status is RunStatus.DRAFT else "RUN_CLOSED"
    return Rejection(reason, f"run takes no learners and no deltas. status={state.status}")


def check_live(state: RunState, learner_id: str, session: str) -> Rejection | None:
    """A push needs the newest session of its learner."""
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
    detail = f"session has an accepted delta from that base. base={base_version}, delta={other}"
    return Rejection("BASE_REPEATED", detail)


def check_push(state: RunState, item: AcceptedItem) -> Rejection | None:
    """Returns why a push would be refused before its parts are known, or None; an accepted delta is not refused."""
    if state.delta(item.delta) is not None:
        return None
    if item.base_version == INITIAL_BASE:
        return check_initial(state, item.session, item.fragment)
    return (
        check_open(state)
        or check_live(state, item.learner, item.session)
        or check_base(state, state.fragments[item.fragment], item.base_version, item.base_digest)
        or check_repeated_base(state, item.session, item.fragment, item.base_version)
    )


def check_session(state: RunState, item: SessionItem) -> Rejection | None:
    """A session that was fenced never comes back."""
    learner = state.learners.get(item.learner)
    if state.status is not RunStatus.OPEN or learner is None:
        return check_open(state)
    if item.session in learner.sessions and learner.session != item.session:
        return Rejection("SESSION_FENCED", f"a newer session of this learner attached. learner={item.learner}")
    if learner.session == item.session and not learner.has_left:
        return Rejection("REPEATED", f"session is attached. learner={item.learner}")
    return None


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


def check_snapshot(state: RunState, item: SnapshotItem) -> Rejection | None:
    """A version has at most one snapshot; version 0 of a draft exists by it."""
    fragment = state.fragments[item.fragment]
    if state.are_condemned((*item.weights, *item.outer)):
        return Rejection("INCOMPLETE", "the snapshot's objects were collected")
    if item.version == 0 and fragment.version == INITIAL_BASE:
        return None if state.status is RunStatus.DRAFT else Rejection("RUN_EXISTS", "run has its initial weights")
    version = fragment.remembered(item.version)
    if version is None or version.digest != item.digest or version.is_abandoned or version.weights:
        return Rejection("VERSION_NOT_FOUND", f"no version wants this snapshot. version={item.version}")
    return None


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
        source = fragment.known().get(target.source_version)
        if target.version != fragment.version + 1 or source is None or source.digest != target.digest:
            facts = f"fragment={target.fragment}, version={target.version}, source_version={target.source_version}"
            return Rejection("VERSION_NOT_FOUND", f"fragment has a newer version, or another source. {facts}")
        if state.are_condemned((*target.weights, *target.outer)):
            return Rejection("INCOMPLETE", "the roll-back's objects were collected")
    return None


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


def check_checkpoint(state: RunState, item: CheckpointItem) -> Rejection | None:
    """A checkpoint is newer than the one before, of an earlier entry, and the run is past its draft."""
    if state.status is RunStatus.DRAFT:
        return Rejection("RUN_DRAFT", "a draft has no checkpoints")
    if not state.checkpoint_at < item.at <= state.position:
        return Rejection("REPEATED", f"not a newer checkpoint. at={item.at}, newest={state.checkpoint_at}")
    return None


CHECKS: Final[dict[type[Item], Callable[[RunState, Any], Rejection | None]]] = {
    AcceptedItem: check_accepted,
    SessionItem: check_session,
    LeftItem: check_left,
    ClosedItem: check_closed,
    CommittedItem: check_committed,
    FateItem: check_fates,
    PolicyItem: check_policy,
    SnapshotItem: check_snapshot,
    RollbackItem: check_rollback,
    CollectedItem: check_collected,
    StatusItem: check_status,
    CheckpointItem: check_checkpoint,
}
