"""A process that works on one run in a store, in whichever version of Skerry its PYTHONPATH names.

`python level_worker.py URL`: reads commands from stdin, one JSON object a line, and answers each with a line of JSON.
It uses only what the previous version has too.

    {"do": "open"}                        creates the run if it is not there, and follows it
    {"do": "turn", "seed": 7, "count": 3} appends 3 times what a replica might
    {"do": "raise", "level": 4}           raises the run's format level; the newer version only
    {"do": "fold"}                        folds to the log's end and answers what the fold is
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import sys
from collections.abc import Callable
from typing import Any

from skerry.runtime.clock import SystemClock
from skerry.runtime.identifiers import SystemEntropy
from skerry.runtime.workers import InlineWorkers
from skerry.wire.codecs import Codec, Encoding
from skerry.wire.layout import FragmentLayout, TensorSpec
from skerry.wire.policy import Policy
from skerry_syncer.store.errors import StoreError
from skerry_syncer.store.log.entries import (
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
    Member,
    MergeScalars,
    ObjectRef,
    PolicyItem,
    RollbackFragment,
    RollbackItem,
    RunSpec,
    RunStatus,
    SessionItem,
    SnapshotItem,
    StatusItem,
)
from skerry_syncer.store.log.run_log import RunLog
from skerry_syncer.store.log.state import FragmentState, Outcome, RunState
from skerry_syncer.store.objects.opening import open_objects
from skerry_syncer.store.store import Store

FRAGMENTS = ("head", "tail")
LEARNERS = ("east", "north", "west")
ONE = "3f800000"
SPEC = RunSpec(
    "run",
    "a" * 32,
    tuple(FragmentLayout(name, (TensorSpec(f"{name}.weight", (4,)),)) for name in FRAGMENTS),
    {f"{name}.weight": "float32" for name in FRAGMENTS},
    0.0,
)


class Turns:
    """What a replica might append next, drawn from the state that it knows."""

    def __init__(self, state: RunState, seed: int) -> None:
        self.state = state
        self.random = random.Random(seed)

    def hex_id(self) -> str:
        return f"{self.random.getrandbits(128):032x}"

    def ref(self, folder: str) -> ObjectRef:
        return ObjectRef(f"{folder}-{self.hex_id()}", 0, 4, 10, "0" * 64)

    def item(self) -> Item | None:
        """Returns the next item, or None if what was drawn is impossible now."""
        fragment = self.random.choice(FRAGMENTS)
        makers: list[tuple[int, Callable[[FragmentState], Item | None]]] = [
            (10, self.session),
            (2, self.left),
            (50, self.accepted),
            (15, self.closed),
            (20, self.committed),
            (3, self.fates),
            (2, self.policy),
            (5, self.snapshot),
            (1, self.rollback),
            (5, self.collected),
        ]
        (make,) = self.random.choices([make for _, make in makers], [weight for weight, _ in makers])
        return make(self.state.fragments[fragment])

    def session(self, _: FragmentState) -> Item:
        return SessionItem(
            self.random.choice(LEARNERS), self.hex_id(), "", self.random.choice((0, self.state.position))
        )

    def left(self, _: FragmentState) -> Item | None:
        known = [one for one in self.state.learners.values() if not one.has_left]
        if not known:
            return None
        one = self.random.choice(known)
        return LeftItem(one.learner, one.session)

    def accepted(self, fragment: FragmentState) -> Item | None:
        known = [one for one in self.state.learners.values() if not one.has_left]
        if not known:
            return None
        learner = self.random.choice(known)
        base = fragment.versions[max(0, fragment.version - self.random.choice((0, 0, 0, 1, 3)))]
        delta, steps = self.hex_id(), self.random.choice((3, 24, 24, 40, 100))
        return AcceptedItem(
            delta=delta,
            fragment=fragment.layout.name,
            learner=learner.learner,
            session=learner.session,
            base_version=base.version,
            base_digest=base.digest,
            digest="0" * 64,
            parts=(self.ref(f"deltas/{fragment.layout.name}/{delta}/part"),),
            step_count=steps,
            token_count=100 * steps,
            last_step=steps,
            squared_norms=(self.random.random(),),
        )

    def closed(self, fragment: FragmentState) -> Item | None:
        closing = fragment.closing
        names = [*(member.delta for member in closing.members), *fragment.pending] if closing else [*fragment.pending]
        out = self.random.choice((0, 0, 0, 1))
        members = tuple(Member(name, self.random.random(), 0) for name in names[out:])
        if not members:
            return None
        attempt = closing.attempt + 1 if closing else fragment.next_attempt
        version = closing.version if closing else fragment.version + 1
        decided = tuple(Decided(name, Fate.EXPIRED, "too stale") for name in names[:out])
        rho = self.random.choice((0.25, 0.5, 1.0))
        return ClosedItem(fragment.layout.name, version, attempt, members, rho, decided, length=24.0)

    def committed(self, fragment: FragmentState) -> Item | None:
        closing = fragment.closing
        if closing is None:
            return None
        scalars = MergeScalars(ONE, "00000000", (ONE,), tuple((ONE,) for _ in closing.members), ONE, ONE)
        name, update = fragment.layout.name, (self.ref(f"updates/{fragment.layout.name}/{closing.version}"),)
        encoding = Encoding(Codec.FLOAT32)
        return CommittedItem(name, closing.version, closing.attempt, update, encoding, 2 * self.hex_id(), scalars)

    def fates(self, fragment: FragmentState) -> Item | None:
        pending = list(fragment.pending)
        return FateItem((Decided(pending[-1], Fate.QUARANTINED, "outlier"),)) if pending else None

    def policy(self, _: FragmentState) -> Item:
        policy = Policy(max_staleness=self.random.choice((1, 2, 8)), inner_step_count=self.random.choice((12, 24)))
        return PolicyItem(self.hex_id(), policy)

    def snapshot(self, fragment: FragmentState) -> Item:
        at, name = fragment.newest, fragment.layout.name
        return SnapshotItem(name, at.version, at.digest, (self.ref(f"snapshots/{name}/{at.version}-weights"),), ())

    def rollback(self, fragment: FragmentState) -> Item:
        source, name = fragment.versions[self.random.randrange(fragment.version + 1)], fragment.layout.name
        weights = (self.ref(f"snapshots/{name}/{fragment.version + 1}-weights"),)
        one = RollbackFragment(name, fragment.version + 1, source.version, source.digest, weights, ())
        return RollbackItem(self.hex_id(), 1, (one,))

    def collected(self, fragment: FragmentState) -> Item | None:
        needed = self.state.referenced_names() | self.state.condemned
        newest = [delta for delta, _ in zip(reversed(self.state.deltas.values()), range(20), strict=False)]
        names = [part.name for delta in newest for part in delta.item.parts if part.name not in needed]
        return CollectedItem(tuple(names)) if names else None


class Worker:
    """One replica of the run."""

    def __init__(self, url: str) -> None:
        self.store = Store(
            open_objects(url), clock=SystemClock(), entropy=SystemEntropy(), workers=InlineWorkers(), writer="worker"
        )
        self.log: RunLog | None = None
        self.story = hashlib.sha256()  # of what the fold decided about every item

    async def do(self, command: dict[str, Any]) -> dict[str, Any]:
        """Obeys a command and returns the answer."""
        try:
            match command["do"]:
                case "open":
                    await self.open()
                case "turn":
                    await self.turn(random.Random(command["seed"]), command["count"])
                case "raise":
                    await self.raise_level(command["level"])
                case "fold":
                    return await self.fold()
        except StoreError as error:
            return {"error": error.reason}
        return {}

    async def open(self) -> None:
        self.log = await self.store.create_draft(SPEC)
        self.log.subscribe(self.hear)
        async for entry, data in self.log.entries():
            raise AssertionError(f"the run has entries already: {entry}, {data!r:.80}")

    def hear(self, entry: Entry, outcomes: tuple[Outcome, ...]) -> None:
        told = [
            (one.item.kind, one.rejection and one.rejection.reason, [(d.item.delta, d.fate) for d in one.decided])
            for one in outcomes
        ]
        self.story.update(repr((entry.position, told)).encode())

    async def turn(self, source: random.Random, count: int) -> None:
        assert self.log is not None
        if self.log.state.status is RunStatus.DRAFT:
            await self.log.tail()
        if self.log.state.status is RunStatus.DRAFT:
            snapshots = [SnapshotItem(name, 0, f"{name}-0", (), ()) for name in FRAGMENTS]
            await self.log.append([*snapshots, StatusItem(RunStatus.OPEN)])
        for _ in range(count):
            if source.random() < 0.5:  # else from a view that may be old
                await self.log.tail()
            item = Turns(self.log.state, source.getrandbits(64)).item()
            if item is not None:
                await self.log.append([item])

    async def raise_level(self, level: int) -> None:
        from skerry_syncer.store.log.entries import LevelItem

        assert self.log is not None
        await self.log.append([LevelItem(level)])

    async def fold(self) -> dict[str, Any]:
        assert self.log is not None
        await self.log.tail()
        state = self.log.state
        return {
            "position": state.position,
            "head_digest": state.head_digest,
            "story": self.story.hexdigest(),
            "state": hashlib.sha256(repr(plain(state)).encode()).hexdigest(),
            "versions": [state.fragments[name].version for name in FRAGMENTS],
        }


def plain(state: RunState) -> object:
    """Returns all of the state that both versions have."""
    fragments = [
        (
            name,
            (one.version, one.momentum_from, one.closing, policy_values(one.closing_policy), one.last_close_position),
            (
                one.next_attempt,
                [sorted(who) for who in one.contributors],
                list(one.close_positions),
                one.contributed_at,
                one.worked_until,
            ),
            (
                one.weights,
                one.step_counts,
                list(one.pending),
            ),
            [(v.version, v.digest, v.step_count, v.weights, v.is_abandoned) for v in one.versions.values()],
        )
        for name, one in state.fragments.items()
    ]
    learners = [
        (one.learner, one.session, sorted(one.sessions), one.has_left, one.step_count, one.attached_at)
        for one in state.learners.values()
    ]
    deltas = [(name, one.fate, one.reason, one.version, one.weight_share) for name, one in state.deltas.items()]
    policy = policy_values(state.policy)
    return (state.status, policy, fragments, learners, deltas, sorted(state.condemned), list(state.requests))


def policy_values(policy: Policy | None) -> object:
    """Returns a policy without the fields of later formats, which have their defaults until the level is raised."""
    return None if policy is None else sorted(policy.to_json().items())


async def main(url: str) -> None:
    """Obeys until stdin ends."""
    worker = Worker(url)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        print(json.dumps(await worker.do(json.loads(line))), flush=True)
    await worker.store.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
