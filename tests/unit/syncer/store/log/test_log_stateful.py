"""Replicas of one run do anything in any order while their store fails in every way; the log stays the truth."""

from __future__ import annotations

import asyncio
import random
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from msgspec import structs

from skerry.wire.policy import Policy
from skerry_syncer.store.errors import ObjectExistsError, StoreError, StoreFullError, StoreUnavailableError
from skerry_syncer.store.log.checkpoints import checkpoint_of, state_to_bytes
from skerry_syncer.store.log.entries import (
    AcceptedItem,
    ClosedItem,
    CollectedItem,
    Decided,
    Fate,
    Item,
    Member,
    PolicyItem,
    RunStatus,
    SessionItem,
    SnapshotItem,
    StatusItem,
)
from skerry_syncer.store.log.fold import apply_entry
from skerry_syncer.store.log.run_log import RunLog
from skerry_syncer.store.log.state import Outcome, RunState
from skerry_syncer.store.store import Store
from skerry_syncer.store.versions.run import Run
from tests.simulation.virtual_time import VirtualClock, VirtualTimeLoop
from tests.support.dict_objects import DictObjects
from tests.support.faulty_objects import NO_FAULT, Effect, Fault, FaultyObjects, LateWrites
from tests.support.history import BODY, EMBED, SPEC, accepted, committed, ref, snapshot
from tests.support.log_bench import store_on
from tests.support.seeded_entropy import SeededEntropy

FRAGMENTS = (EMBED, BODY)
LEARNERS = ("east", "north", "west")
PREFIX = f"runs/run/{SPEC.uid}"

SECONDS = st.sampled_from([0.0, 0.01, 0.2, 1.0, 6.0, 30.0, 90.0])
FAULTS = st.builds(
    Fault,
    effect=st.sampled_from(Effect),
    error=st.sampled_from([StoreUnavailableError, StoreUnavailableError, ObjectExistsError, StoreFullError]),
    latency_s=SECONDS,
    answer_latency_s=st.sampled_from([0.0, 0.01, 1.0]),
    landing_s=SECONDS,
)
WHO = st.integers(0, 2)
FRAGMENT = st.sampled_from(FRAGMENTS)
LEARNER = st.sampled_from(LEARNERS)
PAUSE = st.sampled_from([0.001, 0.001, 0.0, 0.3])  # 0: whatever is next begins at the same instant


Make = Callable[..., Item | None]


def appends(**choices: Any) -> Callable[[Make], Callable[..., None]]:
    """Makes a rule of a method that returns the item that a replica appends, by its own log when the work begins."""

    def made(make: Make) -> Callable[..., None]:
        def append(self: LogMachine, who: int, pause_s: float, **chosen: Any) -> None:
            async def items(run: Run) -> list[Item]:
                item = make(self, run.log, **chosen)
                return [] if item is None else [item]

            self.start(who, items, pause_s)

        as_rule: Callable[[Callable[..., None]], Callable[..., None]] = rule(who=WHO, pause_s=PAUSE, **choices)
        return as_rule(append)

    return made


@dataclass
class Replica:
    """One process: it may crash, and come back without memory."""

    objects: FaultyObjects
    store: Store
    run: Run | None = None
    tasks: list[asyncio.Task[None]] = field(default_factory=list)


class LogMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = VirtualTimeLoop()
        self.clock = VirtualClock()
        self.late = LateWrites()
        self.shared = DictObjects()
        self.entropy = SeededEntropy(random.Random(0))
        self.faults: list[deque[Fault]] = [deque() for _ in range(3)]
        self.admitted: list[Item] = []  # what callers were told of: items that took effect
        self.sessions = {learner: self.entropy.hex_id() for learner in LEARNERS}
        self.seen: dict[str, bytes] = {}
        self.begun: list[AcceptedItem] = []
        self.replicas = [self.new_replica(faults) for faults in self.faults]
        self.complete(self.create())

    # The world.

    def complete(self, work: Coroutine[Any, Any, object]) -> None:
        self.loop.run_until_complete(work)

    def advance(self, duration_s: float) -> None:
        self.complete(asyncio.sleep(duration_s))

    def new_replica(self, faults: deque[Fault]) -> Replica:
        def schedule(operation: str, _: str) -> Fault:
            return NO_FAULT if operation == "sync_parent" or not faults else faults.popleft()

        objects = FaultyObjects(self.shared, schedule, clock=self.clock, late=self.late)
        return Replica(objects, store_on(objects, clock=self.clock, entropy=self.entropy))

    async def create(self) -> None:
        run = await self.replicas[0].store.create_draft(SPEC)
        items: list[Item] = [PolicyItem(self.entropy.hex_id(), Policy(max_staleness=2))]
        items += [snapshot(0, fragment) for fragment in FRAGMENTS]
        sessions = [SessionItem(learner, session, "") for learner, session in self.sessions.items()]
        await run.log.append([*items, StatusItem(RunStatus.OPEN), *sessions])
        for replica in self.replicas:
            replica.run = await replica.store.open_run("run", SPEC.uid)

    def start(self, who: int, make: Callable[[Run], Coroutine[Any, Any, Sequence[Item]]], pause_s: float) -> None:
        """Has a replica append what `make` returns. What it is told is remembered, errors are its caller's to bear."""
        replica = self.replicas[who]

        async def work() -> None:
            try:
                assert replica.run is not None
                self.hear(await replica.run.log.append(await make(replica.run)))
            except StoreError:
                return

        replica.tasks = [task for task in replica.tasks if not task.done()]
        replica.tasks.append(self.loop.create_task(work()))
        self.advance(pause_s)

    def hear(self, outcomes: tuple[Outcome, ...]) -> None:
        self.admitted += [outcome.item for outcome in outcomes if outcome.rejection is None]

    async def stored_push(self, run: Run, learner: str, fragment: str, age: int) -> AcceptedItem:
        """Stores a part, and returns the item that has its delta accepted, from a base that is `age` versions old."""
        state = run.state.fragments[fragment]
        delta, session = self.entropy.hex_id(), self.sessions[learner]
        base = state.versions.get(state.version - age, state.newest)
        stored = await run.blobs.write_part(fragment, delta, 0, 3, "0" * 64, [1.0], [b"frames"])
        item = accepted(delta, learner, base=base.version, fragment=fragment, session=session)
        return structs.replace(item, base_digest=base.digest, parts=(stored.ref,))

    # What replicas do, and what happens to them.

    @rule(who=WHO, faults=st.lists(FAULTS, min_size=1, max_size=5))
    def arm(self, who: int, faults: list[Fault]) -> None:
        self.faults[who].extend(faults)

    @appends(learner=LEARNER)
    def attach(self, _: RunLog, learner: str) -> Item:
        session = self.sessions[learner] = self.entropy.hex_id()
        return SessionItem(learner, session, "")

    @rule(who=WHO, learner=LEARNER, fragment=FRAGMENT, pause_s=PAUSE, age=st.sampled_from([0, 0, 1, 3]))
    def push(self, who: int, learner: str, fragment: str, pause_s: float, age: int = 0) -> None:
        async def work(run: Run) -> list[Item]:
            return [await self.stored_push(run, learner, fragment, age)]

        self.start(who, work, pause_s)

    @rule(who=WHO, learner=LEARNER, fragment=FRAGMENT, age=st.sampled_from([0, 0, 1]))
    def begin_a_push(self, who: int, learner: str, fragment: str, age: int) -> None:
        """Its delta is accepted later, maybe by another replica, or never."""

        async def work(run: Run) -> list[Item]:
            self.begun.append(await self.stored_push(run, learner, fragment, age))
            return []

        self.start(who, work, 0.001)

    @appends(which=st.integers(0, 3))
    def finish_a_push(self, _: RunLog, which: int) -> Item | None:
        return self.begun.pop(which) if which < len(self.begun) else None

    @appends(which=st.integers(0, 30))
    def repeat_an_acknowledged_push(self, _: RunLog, which: int) -> Item | None:
        pushes = [item for item in self.admitted if isinstance(item, AcceptedItem)]
        return pushes[which] if which < len(pushes) else None

    @rule(who=WHO, keep=st.sampled_from([0, 0, 1, 3]), pause_s=PAUSE)
    def checkpoint(self, who: int, keep: int, pause_s: float) -> None:
        """Stores the state and names it; of each fragment at least `keep` older versions are remembered."""

        async def work(run: Run) -> list[Item]:
            item, data = checkpoint_of(run.state, self.entropy)
            fragments = run.state.fragments.items()
            oldest = {name: max(fragment.oldest, fragment.version - keep) for name, fragment in fragments}
            await run.log.objects.write(f"{PREFIX}/{item.name}", data)
            return [structs.replace(item, oldest=oldest)]

        self.start(who, work, pause_s)

    @appends(fragment=FRAGMENT)
    def snapshot(self, log: RunLog, fragment: str) -> Item:
        newest = log.state.fragments[fragment].newest
        weights = ref(f"snapshots/{fragment}/{newest.version}-weights-{self.entropy.hex_id()}")
        return SnapshotItem(fragment, newest.version, newest.digest, (weights,), ())

    @appends(fragment=FRAGMENT, expired=st.integers(0, 1), is_again=st.booleans())
    def close(self, log: RunLog, fragment: str, expired: int, is_again: bool) -> Item | None:
        state = log.state.fragments[fragment]
        frozen = [member.delta for member in state.closing.members] if state.closing else []
        names = [*(frozen if is_again else []), *state.pending]
        decided = tuple(Decided(name, Fate.EXPIRED, "too stale") for name in names[:expired])
        members = tuple(Member(name, 1.0, 0) for name in names[expired:])
        attempt = state.closing.attempt + 1 if state.closing is not None and is_again else 0
        return ClosedItem(fragment, state.version + 1, attempt, members, 1.0, decided, 24.0) if members else None

    @appends(fragment=FRAGMENT)
    def commit(self, log: RunLog, fragment: str) -> Item | None:
        closing = log.state.fragments[fragment].closing
        if closing is None:
            return None
        update = (ref(f"updates/{fragment}/{closing.version}-{self.entropy.hex_id()}"),)
        made = committed(closing.version, closing.attempt)
        return structs.replace(made, fragment=fragment, update=update, digest=self.entropy.hex_id())

    @rule(first=WHO, second=WHO, fragment=FRAGMENT, faults=st.lists(FAULTS, max_size=3))
    def race_through_a_round(self, first: int, second: int, fragment: str, faults: list[Fault]) -> None:
        """Two replicas take every step of one round at the same time, from views that may differ."""
        for learner in LEARNERS:
            self.push(first, learner, fragment, 0.0)
            self.push(second, learner, fragment, 0.001)
        self.faults[second].extend(faults)
        for who in (first, second):
            self.tail(who)
        self.advance(0.5)
        for who in (first, second):
            self.close(who, 0.0, fragment=fragment, expired=0, is_again=False)
        self.advance(0.5)
        for who in (first, second):
            self.commit(who, 0.0, fragment=fragment)
        self.advance(0.5)

    @appends()
    def collect(self, log: RunLog) -> Item | None:
        """Condemns what the replica does not need, and parts that no delta names that it knows, as of slow pushes."""
        stored = {name.removeprefix(f"{PREFIX}/") for name in self.shared.objects if "/deltas/" in name}
        versions = [version for fragment in log.state.fragments.values() for version in fragment.versions.values()]
        stored |= {weights.name for version in versions for weights in version.weights}
        names = tuple(sorted(stored - log.state.referenced_names() - log.state.condemned))
        return CollectedItem(names) if names else None

    @rule(duration_s=SECONDS)
    def wait(self, duration_s: float) -> None:
        self.advance(duration_s)

    @rule(who=WHO)
    def tail(self, who: int) -> None:
        async def work(run: Run) -> list[Item]:
            await run.log.tail()
            return []

        self.start(who, work, 0.0)

    @rule(who=WHO, which=st.integers(0, 7))
    def cancel_a_caller(self, who: int, which: int) -> None:
        tasks = self.replicas[who].tasks
        if which < len(tasks):
            tasks.pop(which).cancel()

    @rule(who=WHO, write_count=st.integers(0, 3), duration_s=SECONDS)
    def crash(self, who: int, write_count: int, duration_s: float) -> None:
        """Ends a process and starts it anew, without memory; its late writes are still on their way."""
        before = self.replicas[who]
        before.objects.crash_after(write_count)
        self.advance(duration_s)
        before.objects.crash_after(0)
        self.complete(self.bury(before))
        self.faults[who].clear()
        fresh = self.replicas[who] = self.new_replica(self.faults[who])

        async def open_run() -> None:
            fresh.run = await fresh.store.open_run("run", SPEC.uid)

        self.complete(open_run())

    async def bury(self, replica: Replica) -> None:
        for task in replica.tasks:
            task.cancel()
        await asyncio.gather(*replica.tasks, return_exceptions=True)
        await replica.store.close()

    # What holds, whatever happened.

    @invariant()
    def entries_stay(self) -> None:
        """No entry that was ever there changes or goes, and none is missing before another."""
        entries = {name: data for name, (data, _) in self.shared.objects.items() if "/log/" in name}
        assert all(entries.get(name) == data for name, data in self.seen.items())
        numbers = sorted(int(name.rpartition("/")[2]) for name in entries)
        assert numbers == list(range(1, len(numbers) + 1))
        self.seen = entries

    def teardown(self) -> None:
        try:
            for faults in self.faults:
                faults.clear()
            self.advance(600)
            self.complete(self.check_end())
        finally:
            for replica in self.replicas:
                self.complete(self.bury(replica))
            self.loop.close()

    async def check_end(self) -> None:
        """Waits for all, and holds the log, as a reader that met no faults folds it, against what callers were told."""
        await self.late.land()
        runs = [replica.run for replica in self.replicas if replica.run is not None]
        for replica, run in zip(self.replicas, runs, strict=True):
            await asyncio.gather(*replica.tasks)
            self.hear(await run.log.append([PolicyItem(self.entropy.hex_id(), Policy())]))
        for run in runs:
            await run.log.tail()
        self.entries_stay()
        state = RunState(SPEC)
        admitted, decided, accepted_counts = Counter[str](), Counter[str](), Counter[str]()
        condemned: set[str] = set()
        async for entry, data in runs[0].log.entries():
            outcomes = apply_entry(state, entry, data)
            decided.update(delta.item.delta for outcome in outcomes for delta in outcome.decided)
            for item in (outcome.item for outcome in outcomes if outcome.rejection is None):
                text = repr(item)
                if isinstance(item, CollectedItem):
                    condemned.update(item.names)
                    admitted[text] = 1  # condemning twice is no harm
                    continue
                admitted[text] += 1
                assert not any(name in text for name in condemned), "what names a condemned object has no effect"
                if isinstance(item, AcceptedItem):
                    accepted_counts[item.delta] += 1
        for run in (*runs, await self.new_replica(deque()).store.open_run("run", SPEC.uid)):
            assert state_to_bytes(run.state) == state_to_bytes(state), "all replicas fold the same"
        assert max(accepted_counts.values(), default=1) == 1, "a delta is accepted once, however late it is repeated"
        assert max(decided.values(), default=1) == 1, "a delta has at most one final fate"
        for item in self.admitted:
            assert admitted[repr(item)] == 1, f"acknowledged, so in the log once: {item}"


LogMachine.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=50,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestTheLogStaysTheTruthWhateverTheStoreDoes = pytest.mark.long(LogMachine.TestCase)
