"""The fold of a run log: the state of a run after its first n entries.

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

from collections import deque
from collections.abc import Iterable, Iterator
from typing import assert_never

from skerry.algorithm.weights import delta_weight
from skerry.store.errors import LogCorruptError
from skerry.store.log.checks import check_item
from skerry.store.log.entries import (
    ENTRY_FORMAT,
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
    RunStatus,
    SessionItem,
    SnapshotItem,
    StatusItem,
    bytes_digest,
)
from skerry.store.log.legacy import STALENESS_IN_ROUNDS_FORMAT, round_length
from skerry.store.log.state import (
    NORM_HISTORY,
    CommitRecord,
    DeltaState,
    FragmentState,
    LearnerState,
    Outcome,
    Rejection,
    VersionState,
)
from skerry.store.run import RunSpec
from skerry.wire.policy import Policy


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
        self.bases: dict[tuple[str, str, int], str] = {}  # (session, fragment, base version) -> delta
        self._format = ENTRY_FORMAT  # of the entry that is applied; between entries of what would be appended now

    @property
    def step_count(self) -> float:
        """The run's progress in inner steps: the mean over fragments of what stands behind their newest versions."""
        counts = [fragment.newest.step_count for fragment in self.fragments.values() if fragment.version >= 0]
        return sum(counts) / len(counts) if counts else 0.0

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
        self._format = entry.format
        outcomes = tuple(self._apply_item(item) for item in entry.items)
        self._format = ENTRY_FORMAT
        return outcomes

    def _apply_item(self, item: Item) -> Outcome:
        rejection = check_item(self, item)
        if rejection is not None:
            return Outcome(item, rejection)
        return Outcome(item, None, tuple(self._admit(item)))

    def staleness(self, fragment: FragmentState, base_version: int) -> int:
        """Returns how old a base is, as `max_staleness` counts it: in rounds, or by an older format in versions."""
        if self._format < STALENESS_IN_ROUNDS_FORMAT:
            return fragment.version - base_version
        return fragment.rounds_behind(base_version, self.policy.inner_step_count)

    def check(self, item: Item) -> Rejection | None:
        """Returns why `item` would be rejected as the next item, or None. Changes nothing."""
        return check_item(self, item)

    def _admit(self, item: Item) -> list[DeltaState]:
        match item:
            case AcceptedItem():
                return self._admit_accepted(item)
            case SessionItem():
                learner = self.learners.setdefault(item.learner, LearnerState(item.learner, item.region, item.session))
                learner.region, learner.session, learner.has_left = item.region, item.session, False
                learner.sessions.add(item.session)
                learner.attached_at, learner.attached_at_step = self.position, self.step_count
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
        self.bases[(item.session, item.fragment, item.base_version)] = item.delta
        learner = self.learners.get(item.learner)
        if learner is not None:
            learner.step_count += item.step_count
        return decided

    def _admit_closed(self, item: ClosedItem) -> list[DeltaState]:
        fragment = self.fragments[item.fragment]
        is_new_round = fragment.closing is None
        if fragment.closing is not None:  # a set that is closed again: its deltas are pending until this item decides
            for member in fragment.closing.members:
                fragment.pending[member.delta] = self.deltas[member.delta]
        decided = self._decide(item.decided)
        for member in item.members:
            delta = fragment.pending.pop(member.delta)
            delta.weight, delta.staleness = member.weight, member.staleness
        fragment.closing = item if item.members else None
        fragment.last_close_position = self.position
        fragment.next_attempt = item.attempt + 1
        if is_new_round:
            fragment.closing_policy = self.policy
            fragment.contributors.append(frozenset(self.deltas[m.delta].item.learner for m in item.members))
        return decided

    def _admit_committed(self, item: CommittedItem) -> list[DeltaState]:
        fragment = self.fragments[item.fragment]
        close = fragment.closing
        assert close is not None  # `check` admitted the item
        before = fragment.versions[item.version - 1].step_count
        step_count = before + close.participation * self.closed_length(fragment, close)
        fragment.closing = None
        fragment.version, fragment.next_attempt = item.version, 0
        fragment.versions[item.version] = VersionState(
            item.version,
            item.digest,
            self.position,
            step_count=step_count,
            commit=CommitRecord(close, item),
        )
        total = sum(member.weight for member in close.members)
        policy = fragment.closing_policy or self.policy
        merged = []
        for member in close.members:
            delta = self.deltas[member.delta]
            delta.fate, delta.version = Fate.MERGED, item.version
            delta.weight_share = member.weight / total if total > 0 else 0.0
            steps = max(delta.item.step_count, 1)
            history = fragment.squared_norms.setdefault(delta.item.learner, deque(maxlen=NORM_HISTORY))
            history.append(sum(delta.item.squared_norms) / (steps * steps))
            fragment.weights[delta.item.learner] = delta_weight(
                delta.item.token_count,
                delta.item.step_count,
                inner_step_count=policy.inner_step_count,
                weight_cap=policy.weight_cap,
            )
            fragment.contributed_at[delta.item.learner] = fragment.newest.step_count
            # How far the delta's own steps reach. Its merge may be much later, if the delta arrived late.
            reached = fragment.versions[delta.item.base_version].step_count + delta.item.step_count
            fragment.worked_until[delta.item.learner] = min(fragment.newest.step_count, reached)
            merged.append(delta)
        return merged

    def closed_length(self, fragment: FragmentState, close: ClosedItem) -> float:
        """Returns the length of a frozen round, in inner steps."""
        if close.length > 0:
            return close.length
        deltas = [self.deltas[member.delta].item for member in close.members]
        return round_length(
            [delta.step_count for delta in deltas],
            participation=close.participation,
            missed_step_count=fragment.missed_step_count((delta.learner for delta in deltas), close.version - 1),
            inner_step_count=(fragment.closing_policy or self.policy).inner_step_count,
        )

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
        for delta in initial:  # the snapshot was made of the first push; others of the same fragment expire
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
            fragment.version, fragment.next_attempt = one.version, 0
            fragment.momentum_from = fragment.versions[one.source_version].step_count
            fragment.squared_norms.clear()
            fragment.contributed_at.clear()
            fragment.worked_until.clear()
            fragment.versions[one.version] = VersionState(
                one.version,
                one.digest,
                self.position,
                step_count=fragment.versions[one.source_version].step_count,
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
            for version in self.chain(fragment, fragment.version):
                refs = (*version.weights, *version.outer) or self.round_refs(version)
                names.update(ref.name for ref in refs)
        return names

    def chain(self, fragment: FragmentState, newest: int) -> Iterator[VersionState]:
        """Yields the versions that rebuilding `newest` takes: itself, and those before it down to a snapshot."""
        at = fragment.versions.get(newest)
        while at is not None:
            yield at
            if at.weights and self.condemned.isdisjoint(ref.name for ref in (*at.weights, *at.outer)):
                return
            at = fragment.versions.get(at.version - 1)

    def round_refs(self, version: VersionState) -> Iterator[ObjectRef]:
        """Yields the objects of the round that made a version: its update, and the deltas that went into it."""
        if version.commit is not None:
            yield from version.commit.commit.update
            for member in version.commit.close.members:
                yield from self.deltas[member.delta].item.parts
