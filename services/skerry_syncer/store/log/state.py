"""A run's state, its parts, and queries on them. The fold changes them; other code only reads them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, KeysView, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from skerry.algorithm.merge import Pace
from skerry.algorithm.rounds import rounds_behind
from skerry.wire.layout import FragmentLayout
from skerry.wire.policy import Policy
from skerry_syncer.store.log.entries import (
    INITIAL_BASE,
    AcceptedItem,
    ClosedItem,
    CommittedItem,
    Fate,
    Item,
    MetricsItem,
    ObjectRef,
    RunSpec,
    RunStatus,
)

# How many closes of a fragment have their contributors kept: an absent learner is expected until it has missed two.
REMEMBERED_CLOSES: Final = 2


@dataclass(frozen=True)
class Rejection:
    """Why an item had no effect: a reason of `skerry.v1.ErrorReason` without its prefix, and the facts."""

    reason: str
    detail: str


@dataclass(frozen=True)
class Outcome:
    """What the fold decided about one item."""

    item: Item
    rejection: Rejection | None
    decided: tuple[DeltaState, ...] = ()  # deltas that got their final fate by this item


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

    @property
    def short_reason(self) -> str:
        """The reason without its facts, which differ between deltas."""
        return self.reason.partition(". ")[0]


class Contribution(NamedTuple):
    """What was merged of a learner, or of an organisation, in all rounds that led to a version of a fragment."""

    learner: str  # empty: all of the organisation's
    organisation: str
    token_count: int = 0
    step_count: int = 0
    weight: float = 0.0  # the sum of the shares of the rounds' weights
    version_count: int = 0


@dataclass
class VersionState:
    """One version of one fragment and where its content is."""

    version: int
    digest: str
    position: int
    step_count: float = 0.0  # inner steps behind it: the sum over its rounds of length times participation
    token_count: float = 0.0  # tokens behind it, of all learners: the sum over its rounds
    contributions: tuple[Contribution, ...] = ()  # for people; decide nothing
    commit: CommitRecord | None = None  # None for a version without a merge: 0, or by a roll-back
    weights: tuple[ObjectRef, ...] = ()  # the objects of its snapshot; empty if it has none
    outer: tuple[ObjectRef, ...] = ()
    source_version: int = -1
    is_abandoned: bool = False
    made_at_age_s: float = 0.0  # the run's age then
    until: int = 0  # the log position of the next version; 0 for the newest version

    @property
    def weights_refs(self) -> tuple[ObjectRef, ...]:
        """Its update, or its snapshot's weights, and both where it has both."""
        return (*self.weights, *(() if self.commit is None else self.commit.commit.update))


@dataclass(frozen=True)
class CommitRecord:
    """The close and the commit that made a version. Replaying it takes these and the blobs."""

    close: ClosedItem
    commit: CommittedItem


@dataclass
class FragmentState:
    """One fragment: its versions, its gathering round and its round in merge."""

    layout: FragmentLayout
    version: int = INITIAL_BASE  # the newest one; INITIAL_BASE in a draft without weights
    oldest: int = 0  # of versions below it only some are known, by their weights
    momentum_from: float = 0.0  # step count at which outer momentum began: 0, or the last roll-back's
    versions: dict[int, VersionState] = field(default_factory=dict)
    pending: dict[str, DeltaState] = field(default_factory=dict)  # accepted deltas in no frozen set, in log order
    closing: ClosedItem | None = None  # the frozen set whose merge is not committed
    closing_policy: Policy | None = None  # the policy at that set's first close, which its merge uses
    last_close_position: int = 0
    next_attempt: int = 0  # number of the next attempt to close; above 0 if all deltas were unreadable
    contributors: tuple[frozenset[str], ...] = ()  # of the last `REMEMBERED_CLOSES` closes
    close_positions: tuple[int, ...] = ()  # log positions of the same closes
    contributed_at: dict[str, float] = field(default_factory=dict)  # by learner: step_count at its last merge
    worked_until: dict[str, float] = field(default_factory=dict)  # by learner: step_count that this delta trained up to
    paces: dict[str, Pace] = field(default_factory=dict)  # by learner, of its deltas merged since a roll-back
    weights: dict[str, float] = field(default_factory=dict)  # by learner: w of its last merged delta, not damped
    speeds: dict[str, float] = field(default_factory=dict)  # by learner: s / R of that delta, at most 1

    @property
    def newest(self) -> VersionState:
        """The newest version's state; raises KeyError in a draft without weights."""
        return self.versions[self.version]

    def at(self, position: int) -> VersionState | None:
        """Returns the known version that was the newest at a log position, or None."""
        for _, version in sorted(self.versions.items(), reverse=True):
            if version.position <= position and not 0 < version.until <= position:
                return version
        return None

    def rounds_behind(self, base_version: int, inner_step_count: int) -> int:
        """Returns by how many rounds of H steps the run went on since a version; 0 where it was rolled back."""
        steps = self.newest.step_count - self.versions[base_version].step_count
        return rounds_behind(max(0.0, steps), inner_step_count=inner_step_count)

    def missed_step_count(self, learner: str) -> float:
        """Returns the inner steps that the run made without a learner: all if none of its work was merged."""
        return self.newest.step_count - self.worked_until.get(learner, 0.0)


@dataclass
class LearnerState:
    """A learner as the log knows it."""

    learner: str
    region: str
    session: str
    sessions: list[str] = field(default_factory=list)  # all that it ever had; a fenced one is never live again
    has_left: bool = False
    organisation: str = ""  # as the certificate of its newest session has it
    ejected_at: int = 0  # position of its ejection; 0: it may take part
    step_count: int = 0  # inner steps in its accepted deltas
    attached_at: int = 0  # position of its newest session
    attached_at_step: float = 0.0  # the run's progress at that position
    last_deltas: dict[str, str] = field(default_factory=dict)  # by fragment: its last accepted delta
    # How many of its deltas had each final fate, by the fate and the reason without its facts.
    fates: dict[Fate, dict[str, int]] = field(default_factory=dict)

    @property
    def was_back(self) -> bool:
        """Whether it attached again with a new session."""
        return len(self.sessions) > 1


@dataclass
class ReportState:
    """A judge's report, the run's progress at its position, and what the gate says of it."""

    item: MetricsItem
    step_count: float | None  # None: the run had forgotten the versions when the report came
    token_count: float | None
    is_abandoned: bool  # by a roll-back
    better_position: int = 0  # of the report that it is worse than by more than the gate's margin; 0: of none


@dataclass(frozen=True)
class AskedRollback:
    """A roll-back that the gate asks for."""

    request_id: str  # the same on every replica
    failed_position: int  # what the failed report is about
    target_position: int
    author: str


@dataclass(eq=False)
class RunState:
    """A run after the entries that were applied to it; at first a draft. Only the fold changes it."""

    spec: RunSpec
    policy: Policy = field(default_factory=Policy)
    status: RunStatus = RunStatus.DRAFT
    position: int = 0
    age_s: float = 0.0  # how long it had been served by then, as the entries say
    head_digest: str = ""  # of the entry at `position`; before the first entry of `run.json`
    fragments: dict[str, FragmentState] = field(init=False)
    deltas: dict[str, DeltaState] = field(default_factory=dict)
    learners: dict[str, LearnerState] = field(default_factory=dict)
    condemned_at: dict[str, int] = field(default_factory=dict)  # names of objects, with the positions of their entries
    requests: dict[str, int] = field(default_factory=dict)  # ids of calls that changed the run, with their positions
    bases: dict[tuple[str, str, int], str] = field(default_factory=dict)  # (session, fragment, base version) -> delta
    reports: dict[str, ReportState] = field(default_factory=dict)  # the newest of all judges, by request id
    asked_rollback: AskedRollback | None = None  # that was not carried out yet
    checkpoint_at: int = 0  # the position whose state the newest named checkpoint has

    def __post_init__(self) -> None:
        """Starts before the first entry where nothing else is given."""
        self.head_digest = self.head_digest or self.spec.digest
        self.fragments = {layout.name: FragmentState(layout) for layout in self.spec.fragments}

    @property
    def condemned(self) -> KeysView[str]:
        """The names of condemned objects; a view that follows the fold."""
        return self.condemned_at.keys()

    def are_condemned(self, refs: Iterable[ObjectRef]) -> bool:
        """Whether any of these objects was condemned."""
        return not self.condemned.isdisjoint(ref.name for ref in refs)

    def steps_since_work(self, fragment: FragmentState, learner: str) -> float:
        """Returns by how many inner steps the run went on since a learner's last merged delta, or attachment."""
        since = max(fragment.contributed_at.get(learner, 0.0), self.learners[learner].attached_at_step)
        return max(0.0, fragment.newest.step_count - since)

    @property
    def step_count(self) -> float:
        """The run's progress in inner steps: the mean over fragments of what stands behind their newest versions."""
        return _mean([version.step_count for version in self._newest_versions])

    @property
    def token_count(self) -> float:
        """The run's progress in tokens of all learners, as a mean likewise."""
        return _mean([version.token_count for version in self._newest_versions])

    @property
    def _newest_versions(self) -> list[VersionState]:
        return [fragment.newest for fragment in self.fragments.values() if fragment.version != INITIAL_BASE]

    def referenced_names(self) -> set[str]:
        """Returns the names of objects that no collection may take: all that is reachable and not condemned.

        Pending and frozen deltas, the newest snapshot of every fragment and everything after it are always among them.
        """
        undecided = [delta for delta in self.deltas.values() if delta.fate is Fate.PENDING]
        names = {part.name for delta in undecided for part in delta.item.parts}
        for fragment in self.fragments.values():
            for version in self.chain(fragment, fragment.version):
                refs = (*version.weights, *version.outer) or self.round_refs(version)
                names.update(ref.name for ref in refs)
        return names

    def chain(self, fragment: FragmentState, newest: int) -> Iterator[VersionState]:
        """Yields the known versions that rebuilding `newest` takes: itself, and those before it down to a snapshot."""
        while (version := fragment.versions.get(newest)) is not None:
            yield version
            if version.weights and not self.are_condemned((*version.weights, *version.outer)):
                return
            newest -= 1

    def chain_of_rounds(self, fragment: FragmentState) -> Iterator[CommitRecord]:
        """Yields the remembered rounds that led to the newest version, newest first, back to a roll-back."""
        for number in range(fragment.version, fragment.oldest - 1, -1):
            version = fragment.versions.get(number)
            if version is None or version.commit is None:
                return
            yield version.commit

    def round_refs(self, version: VersionState) -> Iterator[ObjectRef]:
        """Yields the objects of the round that made a version: its update, and the deltas that went into it."""
        if version.commit is not None:
            yield from version.commit.commit.update
            for member in version.commit.close.members:
                yield from self.deltas[member.delta].item.parts


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
