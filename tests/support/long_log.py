"""Long logs, made by the store's own encoder and fold in a fraction of the time that training takes.

Every learner contributes to every round of every fragment, one item an entry: a delta of each learner, the close, the
commit and, as often as the default policy asks for it, a snapshot. Entries and `run.json` are what a syncer would
write; the blobs that they name are not there, because opening a run reads none.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final

from skerry.wire.codecs import Codec, Encoding
from skerry.wire.layout import FragmentLayout, TensorSpec
from skerry.wire.policy import Policy
from skerry_syncer.store.log.checkpoints import CHECKPOINT_EVERY, checkpoint_of
from skerry_syncer.store.log.entries import (
    AcceptedItem,
    ClosedItem,
    CommittedItem,
    Entry,
    Item,
    Member,
    MergeScalars,
    ObjectRef,
    PolicyItem,
    RunSpec,
    RunStatus,
    SessionItem,
    SnapshotItem,
    StatusItem,
    entry_name,
    run_prefix,
)
from skerry_syncer.store.log.fold import apply_entry
from skerry_syncer.store.log.state import RunState
from tests.support.seeded_entropy import SeededEntropy

RUN: Final = "history"
UID: Final = "0" * 32
SEED: Final = 20261
NUMEL: Final = 2**20
# Updates of 4 bits weigh as much as a snapshot of 32 after eight.
SNAPSHOT_EVERY: Final = 8
_SCALAR: Final = "3f800000"
_ENCODING: Final = Encoding(Codec.INT4)


class Synthesis:
    """A run that grows by entries; `put` gets the name and the bytes of every object."""

    def __init__(self, put: Callable[[str, bytes], None], *, fragment_count: int, learner_count: int) -> None:
        """Writes `run.json` and the entries that open the run."""
        names = [f"fragment-{number}" for number in range(fragment_count)]
        layouts = tuple(FragmentLayout(name, (TensorSpec(f"{name}.weight", (NUMEL,)),)) for name in names)
        self.spec = RunSpec(RUN, UID, layouts, {f"{name}.weight": "float32" for name in names}, 0.0)
        self.state = RunState(self.spec)
        self._put = put
        self._entropy = SeededEntropy(random.Random(SEED))
        self._prefix = run_prefix(RUN, UID)
        self._sessions = {f"learner-{number}": self._entropy.hex_id() for number in range(learner_count)}
        put(entry_name(self._prefix, 0), self.spec.to_bytes())
        self._append(
            PolicyItem(self._entropy.hex_id(), Policy()),
            *(self._snapshot(name, 0) for name in names),
            StatusItem(RunStatus.OPEN),
            *(SessionItem(learner, session, "") for learner, session in self._sessions.items()),
        )

    def grow(self, position: int) -> None:
        """Appends rounds, one fragment after another, until the log has at least `position` entries."""
        while self.state.position < position:
            for name in self.state.fragments:
                if self.state.position < position:
                    self._round(name)
                    self._checkpoint()

    def _round(self, name: str) -> None:
        members = []
        for learner, session in self._sessions.items():
            delta = self._delta(name, learner, session)
            self._append(delta)
            members.append(Member(delta.delta, 24_000.0, 0))
        version = self.state.fragments[name].version + 1
        self._append(ClosedItem(name, version, 0, tuple(members), 1.0, (), 24.0))
        self._append(self._commit(name, version, len(members)))
        if version % SNAPSHOT_EVERY == 0:
            self._append(self._snapshot(name, version))

    def _checkpoint(self) -> None:
        if self.state.position - self.state.checkpoint_at >= CHECKPOINT_EVERY:
            item, data = checkpoint_of(self.state, self._entropy)
            self._put(f"{self._prefix}/{item.name}", data)
            self._append(item)

    def _delta(self, name: str, learner: str, session: str) -> AcceptedItem:
        base = self.state.fragments[name].newest
        delta = self._entropy.hex_id()
        digest = self._digest()
        name_of_part = f"deltas/{name}/{delta}/0-{NUMEL}-{digest}-{self._entropy.hex_id()}"
        return AcceptedItem(
            delta=delta,
            fragment=name,
            learner=learner,
            session=session,
            base_version=base.version,
            base_digest=base.digest,
            digest=self._digest(),
            parts=(ObjectRef(name_of_part, 0, NUMEL, NUMEL // 2, digest),),
            step_count=24,
            token_count=24_000,
            last_step=24 * (base.version + 1),
            squared_norms=(0.123456789012345,),
        )

    def _commit(self, name: str, version: int, member_count: int) -> CommittedItem:
        scalars = MergeScalars(_SCALAR, _SCALAR, (_SCALAR,), ((_SCALAR,),) * member_count, _SCALAR, _SCALAR)
        update = self._ref(f"updates/{name}/{version}", NUMEL // 2)
        return CommittedItem(name, version, 0, (update,), _ENCODING, self._digest(), scalars)

    def _snapshot(self, name: str, version: int) -> SnapshotItem:
        known = self.state.fragments[name].versions.get(version)
        weights, *outer = (
            self._ref(f"snapshots/{name}/{version}-{kind}", 4 * NUMEL) for kind in ("weights", "momentum", "residual")
        )
        return SnapshotItem(name, version, known.digest if known else self._digest(), (weights,), tuple(outer))

    def _ref(self, name: str, size_bytes: int) -> ObjectRef:
        return ObjectRef(f"{name}-{self._entropy.hex_id()}", 0, NUMEL, size_bytes, self._digest())

    def _digest(self) -> str:
        return self._entropy.hex_id() + self._entropy.hex_id()

    def _append(self, *items: Item) -> None:
        position = self.state.position + 1
        entry = Entry(
            position,
            UID,
            self.state.head_digest,
            "benchmark",
            self._entropy.hex_id(),
            1.8e9 + position,
            items,
        )
        data = entry.to_bytes()
        for outcome in apply_entry(self.state, entry, data):
            if outcome.rejection is not None:
                raise ValueError(f"made an entry that the fold rejects. rejection={outcome.rejection}")
        self._put(entry_name(self._prefix, position), data)
