"""Several replicas of one run on one store with faults, on virtual time, and the checks that hold whatever they met."""

from __future__ import annotations

import asyncio
import random
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from skerry.runtime.workers import InlineWorkers
from skerry.wire.layout import FragmentLayout, TensorSpec
from skerry.wire.policy import Policy
from skerry_syncer.store.errors import StoreError
from skerry_syncer.store.log.checkpoints import checkpoint_of, state_to_bytes
from skerry_syncer.store.log.entries import (
    AcceptedItem,
    CollectedItem,
    CommittedItem,
    Fate,
    Item,
    ObjectRef,
    PolicyItem,
    RollbackItem,
    RunSpec,
    RunStatus,
    SessionItem,
    SnapshotItem,
    StatusItem,
)
from skerry_syncer.store.log.fold import apply_entry
from skerry_syncer.store.log.retention import has_weights_at
from skerry_syncer.store.log.run_log import RunLog
from skerry_syncer.store.log.state import Outcome, RunState
from skerry_syncer.store.store import Store
from skerry_syncer.store.versions.run import Run
from tests.simulation.virtual_time import VirtualClock, VirtualTimeLoop
from tests.support.dict_objects import DictObjects
from tests.support.faulty_objects import NO_FAULT, Fault, FaultyObjects, LateWrites
from tests.support.history import accepted, committed
from tests.support.seeded_entropy import SeededEntropy

T = TypeVar("T")
FRAGMENTS = ("head", "tail")
LEARNERS = ("east", "north", "west")


@dataclass
class Replica:
    """One process: it may crash, and come back without memory."""

    name: str
    objects: FaultyObjects
    store: Store
    faults: deque[Fault]
    opened: Run | None = None
    tasks: list[asyncio.Task[None]] = field(default_factory=list)


class LogWorld:
    """A run, its replicas and all that callers were told."""

    def __init__(self, seed: int = 0) -> None:
        self.loop = VirtualTimeLoop()
        self.clock = VirtualClock()
        self.late = LateWrites()
        self.shared = DictObjects()
        self.entropy = SeededEntropy(random.Random(seed))
        self.admitted: list[Item] = []  # what callers were told of: items that took effect
        self.fates: dict[str, tuple[Fate, int]] = {}  # and the fates that these decided
        self.sessions: dict[str, str] = {}
        self.seen: dict[str, bytes] = {}
        self.begun: list[AcceptedItem] = []
        self.accepted: Counter[str] = Counter()  # at the end: how often each delta was accepted
        uid = self.entropy.hex_id()
        layouts = tuple(FragmentLayout(name, (TensorSpec(f"{name}.weight", (4,)),)) for name in FRAGMENTS)
        self.spec = RunSpec("run", uid, layouts, {f"{name}.weight": "float32" for name in FRAGMENTS}, 0.0)
        self.replicas = [self.new_replica(f"replica-{number}") for number in range(3)]
        self.run(self._create())

    def new_replica(self, name: str) -> Replica:
        """Returns a process without memory."""
        faults: deque[Fault] = deque()

        def schedule(operation: str, _: str) -> Fault:
            return NO_FAULT if operation == "sync_parent" or not faults else faults.popleft()

        objects = FaultyObjects(self.shared, schedule, clock=self.clock, late=self.late)
        store = Store(objects, clock=self.clock, entropy=self.entropy, workers=InlineWorkers(), writer=name)
        return Replica(name, objects, store, faults)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs `work` to its end."""
        return self.loop.run_until_complete(work)

    def advance(self, duration_s: float) -> None:
        """Lets time pass."""
        self.run(asyncio.sleep(duration_s))

    async def _create(self) -> None:
        run = await self.replicas[0].store.create_draft(self.spec)
        await self.replicas[0].store.publish("run", self.spec.uid)
        items: list[Item] = [PolicyItem(self.entropy.hex_id(), Policy(max_staleness=2))]
        items += [SnapshotItem(name, 0, f"{name}-0", (self.ref(f"snapshots/{name}/0"),), ()) for name in FRAGMENTS]
        self.sessions = {learner: self.entropy.hex_id() for learner in LEARNERS}
        sessions = [SessionItem(learner, session, "") for learner, session in self.sessions.items()]
        await run.log.append([*items, StatusItem(RunStatus.OPEN), *sessions])
        self.replicas[0].opened = run
        for replica in self.replicas[1:]:
            replica.opened = await replica.store.open_run("run", self.spec.uid)

    def ref(self, folder: str) -> ObjectRef:
        """Returns a reference to an object that need not exist."""
        return ObjectRef(f"{folder}-{self.entropy.hex_id()}", 0, 4, 10, "0" * 64)

    def start(self, replica: Replica, make: Callable[[Run], Coroutine[Any, Any, tuple[Outcome, ...]]]) -> None:
        """Begins work on a replica; what it is told is remembered, errors are its caller's to bear."""
        run = replica.opened
        if run is None:
            return

        async def work() -> None:
            try:
                outcomes = await make(run)
            except StoreError:
                return
            self.hear(outcomes)

        replica.tasks = [task for task in replica.tasks if not task.done()]
        replica.tasks.append(self.loop.create_task(work()))

    def hear(self, outcomes: tuple[Outcome, ...]) -> None:
        """Remembers an answer."""
        for outcome in outcomes:
            if outcome.rejection is None:
                self.admitted.append(outcome.item)
                self.fates.update({delta.item.delta: (delta.fate, delta.version) for delta in outcome.decided})

    async def push(self, run: Run, learner: str, fragment: str, age: int = 0) -> tuple[Outcome, ...]:
        """Stores a part and has its delta, from a base that is `age` versions old, accepted."""
        return await run.log.append([await self.stored_push(run, learner, fragment, age)])

    async def begin_push(self, run: Run, learner: str, fragment: str, age: int) -> tuple[Outcome, ...]:
        """Stores a part of a delta that is accepted later, maybe by another replica, or never."""
        self.begun.append(await self.stored_push(run, learner, fragment, age))
        return ()

    async def stored_push(self, run: Run, learner: str, fragment: str, age: int) -> AcceptedItem:
        """Stores a part, and returns the item that has its delta accepted."""
        state = run.state.fragments[fragment]
        delta = self.entropy.hex_id()
        base = state.remembered(state.version - age) or state.newest
        stored = await run.blobs.write_part(fragment, delta, 0, 4, "0" * 64, [1.0], [b"frames"])
        item = accepted(delta, learner, base=base.version, fragment=fragment, session=self.sessions[learner])
        return msgspec.structs.replace(item, base_digest=base.digest, parts=(stored.ref,))

    def commit_item(self, log: RunLog, fragment: str) -> CommittedItem | None:
        """Returns what a merge of the frozen round would append."""
        closing = log.state.fragments[fragment].closing
        if closing is None:
            return None
        return msgspec.structs.replace(
            committed(closing.version, closing.attempt),
            fragment=fragment,
            update=(self.ref(f"updates/{fragment}/{closing.version}"),),
            digest=self.entropy.hex_id() * 2,
        )

    async def checkpoint(self, replica: Replica, log: RunLog, keep: int) -> tuple[Outcome, ...]:
        """Stores the state and names it; of each fragment at least `keep` older versions are remembered."""
        item, data = checkpoint_of(log.state, self.entropy)
        oldest = {name: max(one.oldest, one.version - keep) for name, one in log.state.fragments.items()}
        await replica.objects.write(f"{self.prefix}/{item.name}", data)
        return await log.append([msgspec.structs.replace(item, oldest=oldest)])

    def unnamed_parts(self, log: RunLog) -> tuple[str, ...]:
        """Returns the parts that no delta names that `log` knows: of pushes under way, refused or forgotten."""
        stored = {name.removeprefix(f"{self.prefix}/") for name in self.shared.objects if "/deltas/" in name}
        named = {part.name for delta in log.state.deltas.values() for part in delta.item.parts}
        return tuple(sorted(stored - named - log.state.condemned))

    def crash(self, replica: Replica) -> None:
        """Ends a process at once and starts it anew, without memory; its late writes are still on their way."""
        replica.objects.crash_after(0)
        index = self.replicas.index(replica)
        self.run(self._bury(replica))
        fresh = self.new_replica(replica.name)
        self.replicas[index] = fresh
        self.run(self._open(fresh))

    async def _bury(self, replica: Replica) -> None:
        for task in replica.tasks:
            task.cancel()
        await asyncio.gather(*replica.tasks, return_exceptions=True)
        await replica.store.close()

    async def _open(self, replica: Replica) -> None:
        replica.opened = await replica.store.open_run("run", self.spec.uid)

    def check_entries_stay(self) -> None:
        """No entry that was ever there changes or goes, and none is missing before another."""
        entries = {name: data for name, (data, _) in self.shared.objects.items() if "/log/" in name}
        assert all(entries.get(name) == data for name, data in self.seen.items())
        numbers = sorted(int(name.rpartition("/")[2]) for name in entries)
        assert numbers == list(range(1, len(numbers) + 1))
        self.seen = entries

    def check_end(self) -> None:
        """Heals everything, waits for all, and holds the log against what callers were told."""
        for replica in self.replicas:
            replica.faults.clear()
        self.advance(600)
        self.run(self.late.land())
        self.run(self._come_to_rest())
        self.check_entries_stay()
        state, admitted, fates = self.run(self._fold_anew())
        assert max(self.accepted.values(), default=1) == 1, "a delta is accepted once, however late it is repeated"
        for item in self.admitted:
            # Condemning twice what may be condemned is no harm; everything else takes effect once.
            count = min(1, admitted[repr(item)]) if isinstance(item, CollectedItem) else admitted[repr(item)]
            assert count == 1, f"acknowledged, so in the log once: {item}"
        assert max(fates.values(), default=1) == 1, "a delta has at most one final fate"
        for delta, (fate, version) in self.fates.items():
            assert (state.deltas[delta].fate, state.deltas[delta].version) == (fate, version)
        for delta, known in state.deltas.items():
            assert (known.fate is Fate.PENDING) == (delta not in fates)
            names = {part.name for part in known.item.parts}
            assert all(f"{self.prefix}/{name}" in self.shared.objects for name in names - state.condemned)
        for fragment in state.fragments.values():
            assert sorted(fragment.versions) == list(range(fragment.version + 1)), "versions are continuous"

    @property
    def prefix(self) -> str:
        """The run's folder."""
        return f"runs/run/{self.spec.uid}"

    async def _come_to_rest(self) -> None:
        for replica in self.replicas:
            await asyncio.gather(*replica.tasks)
            assert replica.opened is not None
            outcomes = await replica.opened.log.append([PolicyItem(self.entropy.hex_id(), Policy())])
            self.hear(outcomes)
        for replica in self.replicas:
            assert replica.opened is not None
            await replica.opened.log.tail()

    async def _fold_anew(self) -> tuple[RunState, Counter[str], Counter[str]]:
        """Returns the fold by a reader that met no faults, how often each item took effect, and fates by delta."""
        reader = self.new_replica("reader")
        run = await reader.store.open_run("run", self.spec.uid)
        state, forgetful = RunState(self.spec), RunState(self.spec, forgets=True)
        admitted: Counter[str] = Counter()
        fates: Counter[str] = Counter()
        condemned: set[str] = set()
        self.accepted = Counter()
        async for entry, data in run.log.entries():
            outcomes = apply_entry(state, entry, data)
            twins = apply_entry(forgetful, entry, data)
            assert [one.rejection for one in outcomes] == [one.rejection for one in twins], "forgetting decides nothing"
            for folded in (state, forgetful):
                gone = [at for at in folded.policy.pinned_positions if not has_weights_at(folded, at)]
                assert gone == [], "what is pinned stays"
            for name, fragment in state.fragments.items():
                assert fragment.known().keys() == forgetful.fragments[name].known().keys()
            for item in (outcome.item for outcome in outcomes if outcome.rejection is None):
                admitted[repr(item)] += 1
                assert condemned.isdisjoint(names_in(item)), "what names a condemned object has no effect"
                if isinstance(item, AcceptedItem):
                    self.accepted[item.delta] += 1
                if isinstance(item, CollectedItem):
                    condemned.update(item.names)
            fates.update(one.item.delta for outcome in outcomes for one in outcome.decided)
        for one in (run, *(replica.opened for replica in self.replicas if replica.opened is not None)):
            assert state_to_bytes(one.state) == state_to_bytes(forgetful), "all replicas fold the same"
        await reader.store.close()
        return state, admitted, fates

    def close(self) -> None:
        """Ends every process."""
        for replica in self.replicas:
            self.run(self._bury(replica))
        self.loop.close()


def names_in(item: Item) -> set[str]:
    """Returns the objects that an item gives to deltas and versions."""
    match item:
        case AcceptedItem():
            refs = item.parts
        case CommittedItem():
            refs = item.update
        case SnapshotItem():
            refs = (*item.weights, *item.outer)
        case RollbackItem():
            refs = tuple(ref for one in item.fragments for ref in (*one.weights, *one.outer))
        case _:
            refs = ()
    return {ref.name for ref in refs}
