"""What followers of a run are told.

Events of the log follow from its entries alone (`events_of`), so every replica tells the same story, and one that is
told again from the past is the same. Events without an entry (a round that opens, a learner's report, draining) carry
the position at which they were sent.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from skerry.store.log.entries import (
    AcceptedItem,
    ClosedItem,
    CommittedItem,
    Entry,
    Fate,
    LeftItem,
    PolicyItem,
    RollbackItem,
    RunStatus,
    SessionItem,
    SnapshotItem,
    StatusItem,
)
from skerry.store.log.fold import RunState
from skerry.store.log.state import DeltaState, Outcome
from skerry.wire.policy import Policy


@dataclass(frozen=True)
class FateRecord:
    """One delta and its fate at one position."""

    delta: str
    fragment: str
    learner: str
    fate: Fate
    version: int
    reason: str
    staleness: int
    weight_share: float


@dataclass(frozen=True)
class VersionRecord:
    """One version of one fragment."""

    fragment: str
    version: int
    digest: str


@dataclass(frozen=True)
class LearnerReport:
    """What a learner says of itself; specified in `skerry/v1/types.proto`."""

    step_count: int = 0
    token_count: int = 0
    step_time_s: float = 0.0
    loss: float | None = None
    sent_bytes: int = 0
    received_bytes: int = 0
    adopted: tuple[tuple[str, int], ...] = ()  # (fragment, version)
    stall_time_s: float = 0.0


@dataclass(frozen=True)
class LearnerRecord:
    """A learner as observers see it."""

    learner: str
    region: str
    session: str
    is_live: bool
    is_participating: bool
    report: LearnerReport | None


@dataclass(frozen=True)
class RoundOpened:
    """A round of `fragment` that will make `version` has begun to gather."""

    fragment: str
    version: int


@dataclass(frozen=True)
class DeltaAccepted:
    """A delta is in the log."""

    fate: FateRecord


@dataclass(frozen=True)
class RoundClosed:
    """A round's set was frozen."""

    fragment: str
    version: int
    attempt: int
    deltas: tuple[str, ...]


@dataclass(frozen=True)
class VersionCommitted:
    """A version exists."""

    version: VersionRecord
    merged: tuple[FateRecord, ...]
    update_size_bytes: int
    participation: float
    run_step_count: float


@dataclass(frozen=True)
class FatesDecided:
    """Deltas met a fate other than being merged."""

    fates: tuple[FateRecord, ...]


@dataclass(frozen=True)
class PolicyChanged:
    """The policy from here on."""

    policy: Policy


@dataclass(frozen=True)
class RolledBack:
    """Fragments have new versions with older content."""

    versions: tuple[VersionRecord, ...]
    source_versions: tuple[int, ...]
    run_step_count: float


@dataclass(frozen=True)
class StatusChanged:
    """The run's life moved on."""

    status: RunStatus


@dataclass(frozen=True)
class LearnerSeen:
    """A learner attached, left or reported."""

    learner: LearnerRecord


@dataclass(frozen=True)
class Draining:
    """This replica goes away within `grace_s`."""

    grace_s: float


EventKind = (
    RoundOpened
    | DeltaAccepted
    | RoundClosed
    | VersionCommitted
    | FatesDecided
    | PolicyChanged
    | RolledBack
    | StatusChanged
    | LearnerSeen
    | Draining
)


@dataclass(frozen=True)
class Event:
    """Something that happened, and the log position that it reflects."""

    position: int
    kind: EventKind


def fate_record(delta: DeltaState) -> FateRecord:
    """Returns the delta's fate as it is now."""
    return FateRecord(
        delta=delta.item.delta,
        fragment=delta.item.fragment,
        learner=delta.item.learner,
        fate=delta.fate,
        version=delta.version,
        reason=delta.reason,
        staleness=delta.staleness,
        weight_share=delta.weight_share,
    )


def _accepted_record(item: AcceptedItem) -> FateRecord:
    return FateRecord(item.delta, item.fragment, item.learner, Fate.PENDING, 0, "", 0, 0.0)


def events_of(state: RunState, entry: Entry, outcomes: Iterable[Outcome]) -> tuple[Event, ...]:
    """Returns the events of `entry`, from what the fold made of its items just now; `state` stands behind it."""
    kinds: list[EventKind] = []
    for outcome in outcomes:
        if outcome.rejection is None:
            kinds += _kinds_of(state, outcome)
    return tuple(Event(entry.position, kind) for kind in kinds)


def _kinds_of(state: RunState, outcome: Outcome) -> list[EventKind]:
    decided = tuple(fate_record(delta) for delta in outcome.decided)
    unmerged = tuple(record for record in decided if record.fate is not Fate.MERGED)
    kinds: list[EventKind] = []
    match outcome.item:
        case AcceptedItem() as item:
            kinds.append(DeltaAccepted(_accepted_record(item)))
        case ClosedItem() as item:
            kinds.append(RoundClosed(item.fragment, item.version, item.attempt, tuple(m.delta for m in item.members)))
        case CommittedItem() as item:
            size_bytes = sum(ref.size_bytes for ref in item.update)
            merged = tuple(record for record in decided if record.fate is Fate.MERGED)
            version = VersionRecord(item.fragment, item.version, item.digest)
            record = state.fragments[item.fragment].versions[item.version].commit
            assert record is not None  # the item has just been admitted
            kinds.append(VersionCommitted(version, merged, size_bytes, record.close.participation, state.step_count))
        case PolicyItem() as item:
            kinds.append(PolicyChanged(item.policy))
        case RollbackItem() as item:
            versions = tuple(VersionRecord(one.fragment, one.version, one.digest) for one in item.fragments)
            sources = tuple(one.source_version for one in item.fragments)
            kinds.append(RolledBack(versions, sources, state.step_count))
        case StatusItem() as item:
            kinds.append(StatusChanged(item.status))
        case SnapshotItem() as item if decided:  # the initial weights became version 0
            version = VersionRecord(item.fragment, item.version, item.digest)
            merged = tuple(record for record in decided if record.fate is Fate.MERGED)
            kinds.append(VersionCommitted(version, merged, 0, 1.0, 0.0))
        case SessionItem() as item:
            kinds.append(LearnerSeen(LearnerRecord(item.learner, item.region, item.session, True, False, None)))
        case LeftItem() as item:
            kinds.append(LearnerSeen(LearnerRecord(item.learner, "", item.session, False, False, None)))
        case _:
            pass
    if unmerged:
        kinds.append(FatesDecided(unmerged))
    return kinds
