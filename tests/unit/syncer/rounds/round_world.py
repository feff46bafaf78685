"""A run of a few learners, written by hand, so that round decisions can be tested without a store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import structs

from skerry.wire.layout import FragmentLayout, TensorSpec
from skerry.wire.policy import Policy
from skerry_syncer.rounds.engine import RoundEngine
from skerry_syncer.rounds.membership import LearnerReport, LearnerView, MembershipView
from skerry_syncer.store.log.entries import (
    INITIAL_BASE,
    ClosedItem,
    CommittedItem,
    Item,
    MergeScalars,
    ObjectRef,
    PolicyItem,
    RunSpec,
    RunStatus,
    SessionItem,
    StatusItem,
)
from tests.support.history import History, accepted, snapshot

SETTLED_S = 1000.0
THREE = ("eu", "us", "ap")


class RoundWorld(History):
    """One fragment `a` of tensors of four elements, some learners, and their accepted deltas.

    The first learner is the run's creator.
    """

    def __init__(self, *learners: str, policy: Policy | None = None, tensor_count: int = 1) -> None:
        layout = FragmentLayout("a", tuple(TensorSpec(f"w{index}", (2, 2)) for index in range(tensor_count)))
        super().__init__(RunSpec("run", "0" * 32, (layout,), {t.name: "float32" for t in layout.tensors}, 0.0))
        self.layout, self.delta_count = layout, 0
        self.add(PolicyItem("f" * 32, policy or Policy()))
        for creator in learners[:1]:
            self.accept(creator, base=INITIAL_BASE)
        self.add(snapshot(0, "a"), StatusItem(RunStatus.OPEN))
        for learner in learners:
            self.add(SessionItem(learner, f"session-{learner}", "here"))

    def accept(
        self,
        learner: str,
        *,
        steps: int = 24,
        tokens: int | None = None,
        base: int | None = None,
        norm: float = 1.0,
        last_step: int = 24,
        session: str | None = None,
    ) -> str:
        """Has a delta of `learner` accepted and returns its id."""
        self.delta_count += 1
        delta = f"{self.delta_count:032x}"
        version = self.state.fragments["a"].version if base is None else base
        item = structs.replace(
            accepted(delta, learner, base=version, fragment="a", session=session or f"session-{learner}"),
            step_count=steps,
            token_count=steps * 100 if tokens is None else tokens,
            last_step=last_step,
            squared_norms=(norm * norm, *(0.0 for _ in self.layout.tensors[1:])),
        )
        known = self.state.fragments["a"].versions.get(version)  # a roll-back's has the digest of another
        self.admit(structs.replace(item, base_digest=known.digest) if known else item)
        return delta

    def commit(self, update: tuple[ObjectRef, ...] = ()) -> CommittedItem:
        """Commits the frozen set as a merge would, and returns the item."""
        close = self.state.fragments["a"].closing
        assert close is not None
        row = ("00000000",) * len(self.layout.tensors)
        scalars = MergeScalars("00000000", "00000000", row, (row,) * len(close.members), "00000000", "00000000")
        encoding = self.state.policy.update_encoding
        digest = f"a-{close.version}"
        item = CommittedItem("a", close.version, close.attempt, update, encoding, digest, scalars)
        self.admit(item)
        return item

    def closed(self, *live: str) -> ClosedItem:
        """Returns the close that an engine comes to, once any grace is over, while these learners are live."""
        return self.closed_in(view(*live))

    def closed_in(self, seen: MembershipView) -> ClosedItem:
        """Returns the close that an engine comes to once any grace is over."""
        engine = RoundEngine()
        (item,) = engine.decide(self.state, seen, 0.0).items or engine.decide(self.state, seen, 1e6).items
        assert isinstance(item, ClosedItem)
        return item

    def close_and_commit(self, item: Item) -> ClosedItem:
        """Appends a close and its commit."""
        assert isinstance(item, ClosedItem)
        self.admit(item)
        self.commit()
        return item

    def round(self, *learners: str, live: Sequence[str] = (), **delta: Any) -> ClosedItem:
        """Has a delta of each of the learners accepted, closes the round while they or `live` are live, and commits."""
        for name in learners:
            self.accept(name, **delta)
        return self.close_and_commit(self.closed(*(live or learners)))


def learner(*, is_live: bool = True, step_count: int = 24, step_time_s: float = 0.1, **report: Any) -> LearnerView:
    """Returns a learner with a report."""
    return LearnerView(is_live, LearnerReport(step_count=step_count, step_time_s=step_time_s, **report))


def view(*learners: str, age_s: float = SETTLED_S, **report: Any) -> MembershipView:
    """Returns a view in which these learners are live."""
    return MembershipView({name: learner(**report) for name in learners}, age_s)


def is_closed(world: RoundWorld, *live: str, **seen: Any) -> bool:
    """Whether an engine that sees the round for the first time closes it at once."""
    return bool(RoundEngine().decide(world.state, view(*live, **seen), 0.0).items)
