"""Replicas of one run do anything in any order while their store fails in every way; the log stays the truth."""

from dataclasses import replace
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from skerry_syncer.store.errors import ObjectExistsError, StoreFullError, StoreUnavailableError
from skerry_syncer.store.log.entries import (
    AcceptedItem,
    ClosedItem,
    CollectedItem,
    Decided,
    Fate,
    FateItem,
    Item,
    Member,
    PolicyItem,
    RollbackFragment,
    RollbackItem,
    SessionItem,
    SnapshotItem,
)
from skerry_syncer.store.log.retention import pinned_names
from skerry_syncer.store.log.run_log import RunLog
from skerry_syncer.store.log.state import Outcome
from skerry_syncer.store.versions.run import Run
from tests.support.faulty_objects import Effect, Fault
from tests.unit.syncer.store.log.log_world import FRAGMENTS, LEARNERS, LogWorld, Replica

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


class LogMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = LogWorld()

    def replica(self, who: int) -> Replica:
        return self.world.replicas[who]

    def append(self, who: int, make: Any, pause_s: float) -> None:
        """Appends what `make(log)` gives, from the replica's own view when the work begins."""

        async def work(run: Run) -> tuple[Outcome, ...]:
            items: list[Item] = [item for item in [make(run.log)] if item is not None]
            return await run.log.append(items)

        self.world.start(self.replica(who), work)
        self.world.advance(pause_s)

    @rule(who=WHO, faults=st.lists(FAULTS, min_size=1, max_size=5))
    def arm(self, who: int, faults: list[Fault]) -> None:
        self.replica(who).faults.extend(faults)

    @rule(who=WHO, learner=LEARNER, pause_s=PAUSE)
    def attach(self, who: int, learner: str, pause_s: float) -> None:
        session = self.world.entropy.hex_id()
        self.world.sessions[learner] = session
        self.append(who, lambda _: SessionItem(learner, session, ""), pause_s)

    @rule(who=WHO, learner=LEARNER, fragment=FRAGMENT, pause_s=PAUSE, age=st.sampled_from([0, 0, 1, 3]))
    def push(self, who: int, learner: str, fragment: str, pause_s: float, age: int = 0) -> None:
        self.world.start(self.replica(who), lambda run: self.world.push(run, learner, fragment, age))
        self.world.advance(pause_s)

    @rule(who=WHO, learner=LEARNER, fragment=FRAGMENT, age=st.sampled_from([0, 0, 1]))
    def begin_a_push(self, who: int, learner: str, fragment: str, age: int) -> None:
        self.world.start(self.replica(who), lambda run: self.world.begin_push(run, learner, fragment, age))
        self.world.advance(0.001)

    @rule(who=WHO, which=st.integers(0, 3), pause_s=PAUSE)
    def finish_a_push(self, who: int, which: int, pause_s: float) -> None:
        if 0 <= which < len(self.world.begun):
            item = self.world.begun.pop(which)
            self.append(who, lambda _: item, pause_s)

    @rule(who=WHO, other=WHO, learner=LEARNER, fragment=FRAGMENT, keep=st.sampled_from([0, 3]))
    def finish_a_push_after_its_part_was_collected(
        self, who: int, other: int, learner: str, fragment: str, keep: int
    ) -> None:
        """What a slow push stored is condemned as litter, and a checkpoint lets the fold forget what is old."""
        self.tail(other)
        self.begin_a_push(who, learner, fragment, 0)
        self.collect_litter(other, 0.3)
        self.checkpoint(other, keep, 0.3)
        self.finish_a_push(who, len(self.world.begun) - 1, 0.3)

    @rule(who=WHO, which=st.integers(0, 30), pause_s=PAUSE)
    def repeat_an_acknowledged_push(self, who: int, which: int, pause_s: float) -> None:
        pushes = [item for item in self.world.admitted if isinstance(item, AcceptedItem)]
        if which < len(pushes):
            self.append(who, lambda _: pushes[which], pause_s)

    @rule(who=WHO, keep=st.sampled_from([0, 0, 1, 3]), pause_s=PAUSE)
    def checkpoint(self, who: int, keep: int, pause_s: float) -> None:
        replica = self.replica(who)
        self.world.start(replica, lambda run: self.world.checkpoint(replica, run.log, keep))
        self.world.advance(pause_s)

    @rule(who=WHO, fragment=FRAGMENT, pause_s=PAUSE)
    def snapshot(self, who: int, fragment: str, pause_s: float) -> None:
        def item(log: RunLog) -> SnapshotItem:
            newest = log.state.fragments[fragment].newest
            ref = self.world.ref(f"snapshots/{fragment}/{newest.version}-weights")
            return SnapshotItem(fragment, newest.version, newest.digest, (ref,), ())

        self.append(who, item, pause_s)

    @rule(who=WHO, pause_s=PAUSE)
    def collect_litter(self, who: int, pause_s: float) -> None:
        def item(log: RunLog) -> CollectedItem | None:
            names = self.world.unnamed_parts(log)
            return CollectedItem(names) if names else None

        self.append(who, item, pause_s)

    @rule(who=WHO, fragment=FRAGMENT, expired=st.integers(0, 1), is_again=st.booleans(), pause_s=PAUSE)
    def close(self, who: int, fragment: str, expired: int, is_again: bool, pause_s: float) -> None:
        def item(log: RunLog) -> ClosedItem | None:
            state = log.state.fragments[fragment]
            frozen = [member.delta for member in state.closing.members] if state.closing else []
            names = [*(frozen if is_again else []), *state.pending]
            decided = tuple(Decided(name, Fate.EXPIRED, "too stale") for name in names[:expired])
            members = tuple(Member(name, 1.0, 0) for name in names[expired:])
            attempt = state.closing.attempt + 1 if state.closing is not None and is_again else 0
            return ClosedItem(fragment, state.version + 1, attempt, members, 1.0, decided, 24.0) if members else None

        self.append(who, item, pause_s)

    @rule(who=WHO, fragment=FRAGMENT, pause_s=PAUSE)
    def commit(self, who: int, fragment: str, pause_s: float) -> None:
        self.append(who, lambda log: self.world.commit_item(log, fragment), pause_s)

    @rule(first=WHO, second=WHO, fragment=FRAGMENT, faults=st.lists(FAULTS, max_size=3))
    def race_through_a_round(self, first: int, second: int, fragment: str, faults: list[Fault]) -> None:
        """Two replicas take every step of one round at the same time, from views that may differ."""
        for learner in LEARNERS:
            self.push(first, learner, fragment, 0.0)
            self.push(second, learner, fragment, 0.001)
        self.replica(second).faults.extend(faults)
        for who in (first, second):
            self.tail(who)
        self.world.advance(0.5)
        for who in (first, second):
            self.close(who, fragment, 0, False, 0.0)
        self.world.advance(0.5)
        for who in (first, second):
            self.commit(who, fragment, 0.0)
        self.world.advance(0.5)

    @rule(who=WHO, fragment=FRAGMENT, pause_s=PAUSE)
    def quarantine(self, who: int, fragment: str, pause_s: float) -> None:
        def item(log: RunLog) -> FateItem | None:
            pending = list(log.state.fragments[fragment].pending)
            return FateItem((Decided(pending[-1], Fate.QUARANTINED, "outlier"),)) if pending else None

        self.append(who, item, pause_s)

    @rule(who=WHO, fragment=FRAGMENT, pause_s=PAUSE)
    def roll_back(self, who: int, fragment: str, pause_s: float) -> None:
        def item(log: RunLog) -> RollbackItem:
            state = log.state.fragments[fragment]
            weights = (self.world.ref(f"snapshots/{fragment}/{state.version + 1}-weights"),)
            known = state.known()  # those of which only the weights are kept among them
            source = known[min(known)]
            one = RollbackFragment(fragment, state.version + 1, source.version, source.digest, weights, ())
            return RollbackItem(self.world.entropy.hex_id(), 1, (one,))

        self.append(who, item, pause_s)

    @rule(who=WHO, is_greedy=st.booleans(), pause_s=PAUSE)
    def collect(self, who: int, is_greedy: bool, pause_s: float) -> None:
        def item(log: RunLog) -> CollectedItem | None:
            needed = log.state.referenced_names() | (set() if is_greedy else pinned_names(log.state))
            parts = [part.name for delta in log.state.deltas.values() for part in delta.item.parts]
            versions = [version for one in log.state.fragments.values() for version in one.versions.values()]
            snapshots = [ref.name for version in versions for ref in version.weights]
            names = [name for name in [*parts, *snapshots] if name not in needed | log.state.condemned]
            return CollectedItem(tuple(names)) if names else None

        self.append(who, item, pause_s)

    @rule(
        who=WHO,
        count=st.integers(1, 3),
        hours=st.sampled_from([0.0, 0.0, 0.001, 0.01]),
        back=st.none() | st.integers(0, 20),
        unpinned=st.integers(0, 2),
        pause_s=PAUSE,
    )
    def keep(  # noqa: PLR0917 - the rule's own arguments
        self, who: int, count: int, hours: float, back: int | None, unpinned: int, pause_s: float
    ) -> None:
        """Changes what collections keep; pins a position, which may be gone, and takes pins away."""

        def item(log: RunLog) -> PolicyItem:
            before = log.state.policy
            pins = {*before.pinned_positions[unpinned:], *([] if back is None else [max(0, log.state.position - back)])}
            kept = replace(before, kept_version_count=count, kept_hours=hours, pinned_positions=tuple(sorted(pins)))
            return PolicyItem(self.world.entropy.hex_id(), kept)

        self.append(who, item, pause_s)

    @rule(who=WHO, other=WHO, fragment=FRAGMENT)
    def collect_what_leads_to_a_pin(self, who: int, other: int, fragment: str) -> None:
        """The weights at a pin are those of an older version by then, and nothing else needs them."""
        self.keep(who, 1, 0.0, 0, 0, 0.3)
        self.race_through_a_round(who, other, fragment, [])
        self.snapshot(other, fragment, 0.3)
        self.collect(other, True, 0.3)
        self.checkpoint(who, 0, 0.3)

    @rule(duration_s=SECONDS)
    def wait(self, duration_s: float) -> None:
        self.world.advance(duration_s)

    @rule(who=WHO)
    def tail(self, who: int) -> None:
        async def work(run: Run) -> tuple[Outcome, ...]:
            await run.log.tail()
            return ()

        self.world.start(self.replica(who), work)

    @rule(who=WHO, which=st.integers(0, 7))
    def cancel_a_caller(self, who: int, which: int) -> None:
        tasks = self.replica(who).tasks
        if which < len(tasks):
            tasks[which].cancel()
            del tasks[which]

    @rule(who=WHO, write_count=st.integers(0, 3), duration_s=SECONDS)
    def crash(self, who: int, write_count: int, duration_s: float) -> None:
        self.replica(who).objects.crash_after(write_count)
        self.world.advance(duration_s)
        self.world.crash(self.replica(who))

    @precondition(lambda self: hasattr(self, "world"))
    @invariant()
    def entries_stay(self) -> None:
        self.world.check_entries_stay()

    def teardown(self) -> None:
        try:
            self.world.check_end()
        finally:
            self.world.close()


LogMachine.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=50,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestTheLogStaysTheTruthWhateverTheStoreDoes = LogMachine.TestCase
