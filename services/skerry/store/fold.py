"""The pure fold of a run log: what is true of a run after its first n entries.

Every replica, the verifier and every reader run this same code over the same entries, so they agree. It does no I/O, reads no clock and
draws nothing at random. An item that is not admissible where it stands in the log (a close of a round that another replica closed one entry
earlier, a second delta from one base) is *rejected*: it stays in the log and has no effect. So a writer that lost the race for a number may
append the same items at the next one, and learns from the fold whether they took effect.

    AcceptedItem  --> pending --(in a ClosedItem's members, then CommittedItem)--> merged
                         |-----(newer session's delta for the fragment)--> superseded
                         |-----(named in ClosedItem.decided, FateItem, a roll-back, or the end of the run)--> expired, quarantined
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, assert_never

from skerry.store.entries import (
    INITIAL_BASE,
    AcceptedItem,
    ClosedItem,
    CollectedItem,
    CommittedItem,
    Decided,
    Entry,
    Fate,
    FateItem,
    Item,
    LeftItem,
    ObjectRef,
    PolicyItem,
    RollbackItem,
    RunSpec,
    RunStatus,
    SessionItem,
    SnapshotItem,
    StatusItem,
    bytes_digest,
)
from skerry.store.errors import LogCorruptError
from skerry.wire.layout import FragmentLayout
from skerry.wire.policy import Policy

# Merged deltas of a learner whose norms are remembered: enough for a median that one outlier does not move.
NORM_HISTORY: Final = 8
# Closes of a fragment whose contributors are remembered: an absent one is expected until it has missed two.
REMEMBERED_CLOSES: Final = 2


@dataclass(frozen=True)
class Rejection:
    """Why an item had no effect: a reason of `skerry.v1.ErrorReason` without its prefix, and the facts."""

    reason: str
    detail: str


@dataclass(frozen=True)
class Outcome:
    """What the fold made of one item."""

    item: Item
    rejection: Rejection | None
    decided: tuple[DeltaState, ...] = ()  # deltas that met their final fate by this item


@dataclass
class DeltaState:
    """An accepted delta and what became of it."""

    item: AcceptedItem
    position: int
    fate: Fate = Fate.PENDING
    reason: str = ""
    version: int = 0  # the version it went into, where merged
    staleness: int = 0
    weight: float = 0.0
    weight_share: float = 0.0


@dataclass
class VersionState:
    """One version of one fragment and where its content is."""

    version: int
    digest: str
    position: int
    commit: CommitRecord | None = None  # None: exists by its snapshot alone (version 0, or a roll-back)
    weights: tuple[ObjectRef, ...] = ()  # of its snapshot; empty: none
    outer: tuple[ObjectRef, ...] = ()
    source_version: int = -1
    is_abandoned: bool = False


@dataclass(frozen=True)
class CommitRecord:
    """The close and the commit that made a version: all that replaying it takes, besides the blobs."""

    close: ClosedItem
    commit: CommittedItem


@dataclass
class FragmentState:
    """One fragment: its versions, its gathering round and its round in merge."""

    layout: FragmentLayout
    version: int = INITIAL_BASE  # the newest; INITIAL_BASE in a draft before its weights came
    round_count: int = 0  # commits since the start or the last roll-back: n of the outer schedule
    versions: dict[int, VersionState] = field(default_factory=dict)
    pending: dict[str, DeltaState] = field(default_factory=dict)  # accepted, in no frozen set, in log order
    closing: ClosedItem | None = None  # the frozen set whose merge is not committed
    closing_position: int = 0
    last_close_position: int = 0
    contributors: deque[frozenset[str]] = field(default_factory=lambda: deque(maxlen=REMEMBERED_CLOSES))
    squared_norms: dict[str, deque[float]] = field(default_factory=dict)  # by learner: |v|^2 per step^2 of merged deltas
    weights: dict[str, float] = field(default_factory=dict)  # by learner: weight of its last merged delta

    @property
    def newest(self) -> VersionState:
        """The newest version's state; raises KeyError in a draft without weights."""
        return self.versions[self.version]


@dataclass
class LearnerState:
    """A learner as the log knows it."""

    learner: str
    region: str
    session: str
    sessions: set[str] = field(default_factory=set)  # every session it ever had: a fenced one never comes back
    has_left: bool = False
    accepted_count: int = 0
    step_count: int = 0  # inner steps in its accepted deltas


class RunState:
    """A run after the entries that were applied to it. Mutable; only `apply` changes it."""

    def __init__(self, spec: RunSpec, policy: Policy | None = None) -> None:
        """Starts before the first entry, as a draft."""
        self.spec = spec
        self.policy = policy or Policy()
        self.status = RunStatus.DRAFT
        self.position = 0
        self.head_digest = bytes_digest(spec.to_bytes())
        self.fragments = {layout.name: FragmentState(layout) for layout in spec.fragments}
        self.deltas: dict[str, DeltaState] = {}
        self.learners: dict[str, LearnerState] = {}
        self.condemned: set[str] = set()
        self.requests: dict[str, int] = {}  # request ids of policy changes and roll-backs, with their positions
        self._bases: dict[tuple[str, str, int], str] = {}  # (session, fragment, base version) -> delta

    def apply(self, entry: Entry, data: bytes) -> tuple[Outcome, ...]:
        """Applies the next entry, whose bytes are `data`, and returns what became of each of its items.

        Raises:
            LogCorruptError: not this run's next entry; nothing was applied.
        """
        if entry.run_uid != self.spec.uid or entry.position != self.position + 1 or entry.previous != self.head_digest:
            raise LogCorruptError(
                "log entry does not follow its predecessor. "
                f"run={self.spec.name}, position={self.position + 1}, entry_position={entry.position}, "
                f"expected_previous={self.head_digest}, actual_previous={entry.previous}"
            )
        self.position = entry.position
        self.head_digest = bytes_digest(data)
        return tuple(self._apply_item(item) for item in entry.items)

    def _apply_item(self, item: Item) -> Outcome:
        rejection = self.check(item)
        if rejection is not None:
            return Outcome(item, rejection)
        return Outcome(item, None, tuple(self._admit(item)))

    def check(self, item: Item) -> Rejection | None:
        """Returns why `item` would be rejected as the next item, or None. Changes nothing."""
        match item:
            case AcceptedItem():
                return self._check_accepted(item)
            case SessionItem():
                return self._check_session(item)
            case LeftItem():
                learner = self.learners.get(item.learner)
                if learner is None or learner.session != item.session or learner.has_left:
                    return Rejection("SESSION_FENCED", f"not the learner's live session. learner={item.learner}")
            case ClosedItem():
                return self._check_closed(item)
            case CommittedItem():
                closing = self.fragments[item.fragment].closing
                if closing is None or (closing.version, closing.attempt) != (item.version, item.attempt):
                    return Rejection("VERSION_NOT_FOUND", f"no such round waits for a merge. version={item.version}")
                if any(ref.name in self.condemned for ref in item.update):
                    return Rejection("INCOMPLETE", "the update's objects were collected; write them anew")
            case FateItem():
                return self._check_decided(item.decided)
            case SnapshotItem():
                return self._check_snapshot(item)
            case RollbackItem():
                return self._check_rollback(item)
            case PolicyItem():
                if item.request_id in self.requests:
                    return Rejection("ID_REUSED", "request was applied before")
                if self.status in (RunStatus.CLOSING, RunStatus.CLOSED):
                    return Rejection("RUN_CLOSED", f"run takes no policy any more. status={self.status}")
            case CollectedItem():
                live = self.referenced_names()
                if any(name in live for name in item.names):
                    return Rejection("BAD_REQUEST", "a condemned name is referenced")
            case StatusItem():
                return self._check_status(item)
            case _:
                assert_never(item)
        return None

    def _check_accepted(self, item: AcceptedItem) -> Rejection | None:
        known = self.deltas.get(item.delta)
        if known is not None:
            same = (known.item.digest, known.item.fragment) == (item.digest, item.fragment)
            return Rejection("REPEATED" if same else "ID_REUSED", f"delta id was accepted before. delta={item.delta}")
        if any(part.name in self.condemned for part in item.parts):
            return Rejection("INCOMPLETE", "parts were collected meanwhile; send them again")
        fragment = self.fragments[item.fragment]
        if item.base_version == INITIAL_BASE:
            if self.status is not RunStatus.DRAFT:
                return Rejection("RUN_EXISTS", "run has its initial weights")
            return None
        return (
            self._check_push_session(item.learner, item.session)
            or self._check_base(fragment, item.base_version, item.base_digest)
            or self._check_repeated_base(item)
        )

    def _check_push_session(self, learner_id: str, session: str) -> Rejection | None:
        if self.status is RunStatus.DRAFT:
            return Rejection("RUN_DRAFT", "run is a draft; commit it first")
        if self.status is not RunStatus.OPEN:
            return Rejection("RUN_CLOSED", f"run takes no deltas any more. status={self.status}")
        learner = self.learners.get(learner_id)
        if learner is None or session not in learner.sessions:
            return Rejection("SESSION_UNKNOWN", f"session never attached. learner={learner_id}")
        if learner.session != session:
            return Rejection("SESSION_FENCED", f"a newer session of this learner attached. learner={learner_id}")
        return None

    def _check_base(self, fragment: FragmentState, version: int, digest: str) -> Rejection | None:
        if version > fragment.version:
            return Rejection("BASE_FUTURE", f"base version does not exist yet. base={version}, newest={fragment.version}")
        base = fragment.versions.get(version)
        if base is None:
            return Rejection("BASE_FOREIGN", f"base version never existed. base={version}")
        if base.digest != digest:
            return Rejection("BASE_FOREIGN", f"base digest differs. base={version}, expected={base.digest}, actual={digest}")
        if base.is_abandoned:
            return Rejection("BASE_STALE", f"base version was rolled back. base={version}, newest={fragment.version}")
        if fragment.version - version > self.policy.max_staleness:
            return Rejection(
                "BASE_STALE",
                f"base version is too old. base={version}, newest={fragment.version}, max_staleness={self.policy.max_staleness}",
            )
        return None

    def _check_repeated_base(self, item: AcceptedItem) -> Rejection | None:
        other = self._bases.get((item.session, item.fragment, item.base_version))
        if other is None:
            return None
        return Rejection("BASE_REPEATED", f"session has an accepted delta from that base. base={item.base_version}, delta={other}")

    def check_push(
        self, *, fragment: str, learner: str, session: str, base_version: int, base_digest: str, delta: str
    ) -> Rejection | None:
        """Returns why a push would be refused on its header alone, or None; what has an accepted delta is not refused here."""
        if delta in self.deltas:
            return None
        if base_version == INITIAL_BASE:
            return None if self.status is RunStatus.DRAFT else Rejection("RUN_EXISTS", "run has its initial weights")
        rejection = self._check_push_session(learner, session) or self._check_base(
            self.fragments[fragment], base_version, base_digest
        )
        other = self._bases.get((session, fragment, base_version))
        if rejection is None and other is not None:
            detail = f"session has an accepted delta from that base. base={base_version}, delta={other}"
            rejection = Rejection("BASE_REPEATED", detail)
        return rejection

    def _check_session(self, item: SessionItem) -> Rejection | None:
        if self.status is not RunStatus.OPEN:
            reason = "RUN_DRAFT" if self.status is RunStatus.DRAFT else "RUN_CLOSED"
            return Rejection(reason, f"run takes no learners. status={self.status}")
        learner = self.learners.get(item.learner)
        if learner is not None and item.session in learner.sessions and learner.session != item.session:
            return Rejection("SESSION_FENCED", f"a newer session of this learner attached. learner={item.learner}")
        return None

    def _check_closed(self, item: ClosedItem) -> Rejection | None:
        fragment = self.fragments[item.fragment]
        closing = fragment.closing
        expected = (fragment.version + 1, 0) if closing is None else (closing.version, closing.attempt + 1)
        if (item.version, item.attempt) != expected or self.status not in (RunStatus.OPEN, RunStatus.CLOSING):
            return Rejection("VERSION_NOT_FOUND", f"not the next close. expected={expected}")
        frozen = {member.delta for member in closing.members} if closing is not None else set()
        eligible = fragment.pending.keys() | frozen
        members = [member.delta for member in item.members]
        if not members or len(set(members)) != len(members) or not eligible.issuperset(members):
            return Rejection("BAD_REQUEST", "a member is not pending in this fragment")
        named = {decided.delta for decided in item.decided}
        if named & set(members) or not eligible.issuperset(named):
            return Rejection("BAD_REQUEST", "a decided delta is a member, or not pending")
        if closing is not None and not frozen <= named | set(members):
            return Rejection("BAD_REQUEST", "a frozen delta is neither member nor decided")
        return None

    def _check_decided(self, decided: Iterable[Decided]) -> Rejection | None:
        for one in decided:
            delta = self.deltas.get(one.delta)
            if delta is None or one.delta not in self.fragments[delta.item.fragment].pending:
                return Rejection("BAD_REQUEST", f"delta is not pending. delta={one.delta}")
        return None

    def _check_snapshot(self, item: SnapshotItem) -> Rejection | None:
        fragment = self.fragments[item.fragment]
        if any(ref.name in self.condemned for ref in (*item.weights, *item.outer)):
            return Rejection("INCOMPLETE", "the snapshot's objects were collected")
        if item.version == 0 and fragment.version == INITIAL_BASE:
            return None if self.status is RunStatus.DRAFT else Rejection("RUN_EXISTS", "run has its initial weights")
        version = fragment.versions.get(item.version)
        if version is None or version.digest != item.digest or version.is_abandoned or version.weights:
            return Rejection("VERSION_NOT_FOUND", f"no version wants this snapshot. version={item.version}")
        return None

    def _check_rollback(self, item: RollbackItem) -> Rejection | None:
        if item.request_id in self.requests:
            return Rejection("ID_REUSED", "request was applied before")
        if self.status is not RunStatus.OPEN:
            return Rejection("RUN_CLOSED", f"run is not open. status={self.status}")
        for one in item.fragments:
            fragment = self.fragments[one.fragment]
            source = fragment.versions.get(one.source_version)
            if one.version != fragment.version + 1 or source is None or source.digest != one.digest:
                return Rejection("VERSION_NOT_FOUND", f"fragment moved on. fragment={one.fragment}")
            if any(ref.name in self.condemned for ref in (*one.weights, *one.outer)):
                return Rejection("INCOMPLETE", "the roll-back's objects were collected")
        return None

    def _check_status(self, item: StatusItem) -> Rejection | None:
        following = {
            RunStatus.DRAFT: RunStatus.OPEN,
            RunStatus.OPEN: RunStatus.CLOSING,
            RunStatus.CLOSING: RunStatus.CLOSED,
            RunStatus.CLOSED: None,
        }
        if following[self.status] is not item.status:
            return Rejection("RUN_CLOSED", f"status can't follow. status={self.status}, next={item.status}")
        if item.status is RunStatus.OPEN and any(f.version == INITIAL_BASE for f in self.fragments.values()):
            return Rejection("RUN_DRAFT", "initial weights are missing")
        if item.status is RunStatus.CLOSED and any(f.closing is not None for f in self.fragments.values()):
            return Rejection("RUN_CLOSED", "a merge is under way")
        return None

    def _admit(self, item: Item) -> list[DeltaState]:
        match item:
            case AcceptedItem():
                return self._admit_accepted(item)
            case SessionItem():
                learner = self.learners.setdefault(
                    item.learner, LearnerState(item.learner, item.region, item.session)
                )
                learner.region, learner.session, learner.has_left = item.region, item.session, False
                learner.sessions.add(item.session)
            case LeftItem():
                self.learners[item.learner].has_left = True
            case ClosedItem():
                return self._admit_closed(item)
            case CommittedItem():
                return self._admit_committed(item)
            case FateItem():
                return self._decide(item.decided)
            case PolicyItem():
                self.policy = item.policy
                self.requests[item.request_id] = self.position
            case SnapshotItem():
                return self._admit_snapshot(item)
            case RollbackItem():
                return self._admit_rollback(item)
            case CollectedItem():
                self._admit_collected(item)
            case StatusItem():
                return self._admit_status(item)
            case _:
                assert_never(item)
        return []

    def _admit_accepted(self, item: AcceptedItem) -> list[DeltaState]:
        fragment = self.fragments[item.fragment]
        superseded = [
            Decided(other.item.delta, Fate.SUPERSEDED, "a newer session of the learner sent its own")
            for other in fragment.pending.values()
            if other.item.learner == item.learner and other.item.session != item.session
        ]
        decided = self._decide(superseded)
        delta = DeltaState(item, self.position)
        self.deltas[item.delta] = delta
        fragment.pending[item.delta] = delta
        self._bases[(item.session, item.fragment, item.base_version)] = item.delta
        learner = self.learners.get(item.learner)
        if learner is not None:
            learner.accepted_count += 1
            learner.step_count += item.step_count
        return decided

    def _admit_closed(self, item: ClosedItem) -> list[DeltaState]:
        fragment = self.fragments[item.fragment]
        if fragment.closing is not None:  # a set closed again: its deltas are pending until this item names them anew
            for member in fragment.closing.members:
                fragment.pending[member.delta] = self.deltas[member.delta]
        decided = self._decide(item.decided)
        for member in item.members:
            delta = fragment.pending.pop(member.delta)
            delta.weight, delta.staleness = member.weight, member.staleness
        fragment.closing, fragment.closing_position = item, self.position
        fragment.last_close_position = self.position
        if item.attempt == 0:
            fragment.contributors.append(frozenset(self.deltas[m.delta].item.learner for m in item.members))
        return decided

    def _admit_committed(self, item: CommittedItem) -> list[DeltaState]:
        fragment = self.fragments[item.fragment]
        close = fragment.closing
        assert close is not None  # noqa: S101 - `check` admitted the item
        fragment.closing = None
        fragment.version = item.version
        fragment.round_count += 1
        fragment.versions[item.version] = VersionState(
            item.version, item.digest, self.position, commit=CommitRecord(close, item)
        )
        total = sum(member.weight for member in close.members)
        merged = []
        for member in close.members:
            delta = self.deltas[member.delta]
            delta.fate, delta.version = Fate.MERGED, item.version
            delta.weight_share = member.weight / total if total > 0 else 0.0
            steps = max(delta.item.step_count, 1)
            history = fragment.squared_norms.setdefault(delta.item.learner, deque(maxlen=NORM_HISTORY))
            history.append(sum(delta.item.squared_norms) / (steps * steps))
            fragment.weights[delta.item.learner] = member.weight
            merged.append(delta)
        return merged

    def _admit_snapshot(self, item: SnapshotItem) -> list[DeltaState]:
        fragment = self.fragments[item.fragment]
        if fragment.version != INITIAL_BASE:
            version = fragment.versions[item.version]
            version.weights, version.outer = item.weights, item.outer
            return []
        fragment.version = 0
        fragment.versions[0] = VersionState(0, item.digest, self.position, weights=item.weights, outer=item.outer)
        initial = list(fragment.pending.values())
        fragment.pending.clear()
        for delta in initial:  # exactly the push that the snapshot was made of; others of the same fragment are left over
            is_source = delta is initial[0]
            delta.fate = Fate.MERGED if is_source else Fate.EXPIRED
            delta.reason = "" if is_source else "another push brought the initial weights"
        return initial

    def _admit_rollback(self, item: RollbackItem) -> list[DeltaState]:
        self.requests[item.request_id] = self.position
        decided: list[DeltaState] = []
        for one in item.fragments:
            fragment = self.fragments[one.fragment]
            if fragment.closing is not None:
                for member in fragment.closing.members:
                    fragment.pending[member.delta] = self.deltas[member.delta]
                fragment.closing = None
            orphans = [Decided(name, Fate.EXPIRED, "the run was rolled back") for name in fragment.pending]
            decided += self._decide(orphans)
            for version in fragment.versions.values():
                version.is_abandoned |= version.version > one.source_version
            fragment.version, fragment.round_count = one.version, 0
            fragment.squared_norms.clear()
            fragment.versions[one.version] = VersionState(
                one.version,
                one.digest,
                self.position,
                weights=one.weights,
                outer=one.outer,
                source_version=one.source_version,
            )
        return decided

    def _admit_collected(self, item: CollectedItem) -> None:
        self.condemned.update(item.names)

    def _admit_status(self, item: StatusItem) -> list[DeltaState]:
        self.status = item.status
        if item.status is not RunStatus.CLOSED:
            return []
        left = [
            Decided(name, Fate.EXPIRED, "the run was closed")
            for fragment in self.fragments.values()
            for name in fragment.pending
        ]
        return self._decide(left)

    def _decide(self, decided: Iterable[Decided]) -> list[DeltaState]:
        result = []
        for one in decided:
            delta = self.deltas[one.delta]
            del self.fragments[delta.item.fragment].pending[one.delta]
            delta.fate, delta.reason = one.fate, one.reason
            result.append(delta)
        return result

    def referenced_names(self) -> set[str]:
        """Returns the names of objects that no collection may take: all that is reachable and not condemned.

        Pending and frozen deltas, the newest snapshot of every fragment and everything after it are always among them.
        """
        names: set[str] = set()
        for fragment in self.fragments.values():
            for delta in fragment.pending.values():
                names.update(part.name for part in delta.item.parts)
            if fragment.closing is not None:
                for member in fragment.closing.members:
                    names.update(part.name for part in self.deltas[member.delta].item.parts)
            names.update(self._chain_names(fragment))
        return names

    def _chain_names(self, fragment: FragmentState) -> Iterable[str]:
        """Yields what rebuilding the newest version takes: the newest snapshot, its outer state, and the rounds after it."""
        version = fragment.version
        while version >= 0:
            state = fragment.versions[version]
            if state.weights:
                yield from (ref.name for ref in (*state.weights, *state.outer))
                return
            assert state.commit is not None  # noqa: S101 - a version has a commit or a snapshot
            yield from (ref.name for ref in state.commit.commit.update)
            for member in state.commit.close.members:
                yield from (part.name for part in self.deltas[member.delta].item.parts)
            version -= 1


