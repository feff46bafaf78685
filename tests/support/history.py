"""Logs that are written by hand, one entry an item, and the items to write them with."""

from skerry.wire.codecs import Codec, Encoding
from skerry.wire.layout import FragmentLayout, TensorSpec
from skerry_syncer.store.log.entries import (
    AcceptedItem,
    ClosedItem,
    CommittedItem,
    Decided,
    EjectionItem,
    Entry,
    Fate,
    Item,
    Member,
    MergeScalars,
    ObjectRef,
    RollbackFragment,
    RollbackItem,
    RunSpec,
    RunStatus,
    SessionItem,
    SnapshotItem,
    StatusItem,
)
from skerry_syncer.store.log.fold import apply_entry, check_item
from skerry_syncer.store.log.state import Outcome, RunState

EMBED, BODY = "embed", "body"
SPEC = RunSpec(
    "run",
    "a" * 32,
    (FragmentLayout(EMBED, (TensorSpec("e", (2,)),)), FragmentLayout(BODY, (TensorSpec("b", (3,)),))),
    {"e": "float32", "b": "float32"},
    0.0,
)
SCALARS = MergeScalars("3f800000", "00000000", ("3f800000",), (("3f800000",),), "00000000", "3f800000")


class History:
    """A log that is written by hand, one entry an item."""

    def __init__(self, spec: RunSpec = SPEC) -> None:
        self.state = RunState(spec)
        self.entries: list[bytes] = []

    @classmethod
    def opened(cls) -> "History":
        """Returns an open run with version 0 of both fragments and learners m0 and m1."""
        history = cls()
        for item in (snapshot(0, EMBED), snapshot(0), StatusItem(RunStatus.OPEN)):
            history.admit(item)
        for learner in ("m0", "m1"):
            history.admit(SessionItem(learner, f"{learner}-s1", "here"))
        return history

    def add(self, *items: Item) -> tuple[Outcome, ...]:
        """Adds an entry."""
        state = self.state
        entry = Entry(
            state.position + 1,
            state.spec.uid,
            state.head_digest,
            "hand",
            f"{state.position:032x}",
            0.0,
            items,
        )
        data = entry.to_bytes()
        self.entries.append(data)
        self.entry = Entry.from_bytes(data)
        return apply_entry(state, self.entry, data)

    def admit(self, item: Item) -> tuple[str, ...]:
        """Adds an item that must take effect; returns the deltas that it decided."""
        assert check_item(self.state, item) is None
        (outcome,) = self.add(item)
        assert outcome.rejection is None, outcome
        return tuple(delta.item.delta for delta in outcome.decided)

    def reject(self, item: Item) -> str:
        """Adds an item that must have no effect; returns why."""
        before = fingerprint(self.state)
        dry = check_item(self.state, item)
        (outcome,) = self.add(item)
        assert outcome.rejection is not None
        assert outcome.rejection == dry
        assert fingerprint(self.state) == before
        return outcome.rejection.reason

    def fate(self, delta: str) -> tuple[Fate, str]:
        return self.state.deltas[delta].fate, self.state.deltas[delta].reason


def fingerprint(state: RunState) -> str:
    """Returns all that a run's state says, but for where its log ends."""
    values = {name: value for name, value in vars(state).items() if name not in ("position", "head_digest")}
    return repr(values)


def ref(name: str) -> ObjectRef:
    return ObjectRef(name, 0, 3, 10, "0" * 64)


def accepted(
    delta: str, learner: str = "m0", *, base: int = 0, fragment: str = BODY, session: str = ""
) -> AcceptedItem:
    return AcceptedItem(
        delta=delta,
        fragment=fragment,
        learner=learner,
        session=session or f"{learner}-s1",
        base_version=base,
        base_digest=f"{fragment}-{base}" if base >= 0 else "",
        digest=f"digest of {delta}",
        parts=(ref(f"deltas/{fragment}/{delta}/part"),),
        step_count=24,
        token_count=1000,
        last_step=24,
        squared_norms=(4.0,),
    )


def closed(*deltas: str, version: int = 1, attempt: int = 0, decided: tuple[Decided, ...] = ()) -> ClosedItem:
    return ClosedItem(BODY, version, attempt, tuple(Member(delta, 2.0, 0) for delta in deltas), 1.0, decided, 24.0)


def committed(version: int = 1, attempt: int = 0) -> CommittedItem:
    update = (ref(f"updates/{BODY}/{version}-{attempt}"),)
    return CommittedItem(BODY, version, attempt, update, Encoding(Codec.FLOAT32), f"{BODY}-{version}", SCALARS)


def snapshot(version: int, fragment: str = BODY) -> SnapshotItem:
    weights = (ref(f"snapshots/{fragment}/{version}"),)
    return SnapshotItem(fragment, version, f"{fragment}-{version}", weights, ())


def ejection(request: str, learner: str, *, is_ejected: bool = True) -> EjectionItem:
    return EjectionItem(request, learner, is_ejected, "skerry://admin/anna")


def rolled_back(request: str, source: int, version: int, fragment: str = BODY) -> RollbackItem:
    weights = (ref(f"snapshots/{fragment}/{version}-back"),)
    back = RollbackFragment(fragment, version, source, f"{fragment}-{source}", weights, ())
    return RollbackItem(request, 1, (back,))


def committed_round(history: History, *deltas: str, version: int = 1) -> None:
    history.admit(closed(*deltas, version=version))
    history.admit(committed(version))
