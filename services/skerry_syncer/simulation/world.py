"""Runs a scenario: one syncer with the product's fold, round engine and leases, and learners that join by links.

Events are kept in a heap and virtual time jumps from one to the next. A push and a version take what their bits take on
a learner's link, one after another each way; a merge takes what the benchmarks say. The syncer that comes back after an
outage knows the log and nothing else, as the product does.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from random import Random
from typing import Final

from skerry.net.retry import RetrySettings
from skerry.planning.figures import measured
from skerry.wire.layout import FragmentLayout, TensorSpec
from skerry_syncer.rounds.engine import RoundEngine
from skerry_syncer.rounds.leases import Leases
from skerry_syncer.simulation.history import History, LearnerHistory, Round
from skerry_syncer.simulation.learner import SimulatedLearner
from skerry_syncer.simulation.scenario import STORE, SYNCER, Outage, Scenario
from skerry_syncer.store.log import entries
from skerry_syncer.store.log.fold import apply_entry
from skerry_syncer.store.log.retention import oldest_versions
from skerry_syncer.store.log.state import DeltaState, Outcome, RunState

_SCALARS: Final = entries.MergeScalars("", "", (), (), "", "")
_WEIGHT_BITS: Final = 32  # of a parameter, for a learner that joins
_FORGET_EVERY: Final = 512  # versions


class World:
    """A scenario while it happens. Learners exchange by it (`skerry_syncer.simulation.learner.Exchange`)."""

    def __init__(self, scenario: Scenario) -> None:
        """Makes the run; `run` has everything happen."""
        self.now_s = 0.0
        self.scenario, self.history = scenario, History(scenario)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._pauses = Random(f"{scenario.seed}/pauses")
        self._wake_s = math.inf
        self._figures = measured(scenario.policy.delta_encoding.codec)
        self._numel = scenario.parameters / scenario.fragment_count
        self._away, self._cut = Counter[str](), Counter[str]()  # outages by place
        self._waiting: list[tuple[Callable[[], None], SimulatedLearner | None]] = []  # for syncer, store and link
        self._free_s: dict[tuple[str, str], float] = {}  # by learner and direction: when its link is free
        self._learners = {
            name: SimulatedLearner(name, region, scenario.policy, scenario.seed, self)
            for region in scenario.regions
            for name in region.learners
        }
        self.history.learners = {name: LearnerHistory(each.region) for name, each in self._learners.items()}
        self._is_deciding = False
        self._start_syncer()
        layouts = [FragmentLayout(f"{index:03}", (TensorSpec("w", (1,)),)) for index in range(scenario.fragment_count)]
        self.state = RunState(entries.RunSpec("simulated", "0" * 32, tuple(layouts), {"w": "float32"}, 0.0))
        # Deltas have no content by which they could be judged.
        policy = entries.PolicyItem("", replace(scenario.policy, quarantine_ratio=0.0))
        self._append(policy, *self._snapshots(), entries.StatusItem(entries.RunStatus.OPEN))

    def run(self, progress: Callable[[int, int], object] = lambda *_: None) -> History:
        """Returns what happened; `progress` is called with virtual seconds, done and in all."""
        self._plan()
        end_s, shown_s = self.scenario.duration_s, 0.0
        while self._events[0][0] < end_s:
            self.now_s, _, event = heapq.heappop(self._events)
            event()
            if self.now_s > shown_s:
                progress(int(self.now_s), int(end_s))
                shown_s = self.now_s + end_s / 100
        self.now_s = end_s
        for seen, learner in zip(self.history.learners.values(), self._learners.values(), strict=True):
            seen.allocated_s = max(0.0, min(end_s, seen.region.leave_s) - seen.region.join_s)
            seen.taken_step_count, seen.outstanding_step_count = learner.step_count, learner.outstanding_step_count
        return self.history

    # What learners ask for.

    def at_boundary(self, learner: SimulatedLearner, at_s: float) -> None:
        """Calls the learner's `boundary` then."""
        self._at(at_s, learner.boundary)

    def push(self, learner: SimulatedLearner, item: entries.AcceptedItem) -> None:
        """Sends a delta, which announces its round when it begins if it has enough steps."""
        encoded_s = self.now_s + self._figures.learner_cpu_s * self._numel
        begin_s, end_s = self._transfer(learner, "up", encoded_s, self._figures.bits * self._numel)
        if begin_s > self.now_s and item.step_count >= self.scenario.policy.inner_step_count:
            self._at(begin_s, partial(self._begin_push, item))
        self._at(end_s, partial(self._when_served, partial(self._arrive, learner, item), learner))

    def pull(self, learner: SimulatedLearner, fragment: str, version: int) -> None:
        """Fetches a version."""
        end = self._told(learner, partial(learner.pulled, fragment, version))

        def begin() -> None:
            _, end_s = self._transfer(learner, "down", self.now_s, self._figures.bits * self._numel)
            self._at(end_s, end)

        self._told(learner, begin)()

    # What happens to learners.

    def _plan(self) -> None:
        for learner in self._learners.values():
            self._at(learner.region.join_s, partial(self._join, learner))
            if learner.region.leave_s < math.inf:
                self._at(learner.region.leave_s, partial(self._when_served, partial(self._leave, learner), learner))
            if learner.region.chip_count:
                failures = Random(f"{self.scenario.seed}/{learner.name}/failures")
                self._at(self._until_failure_s(learner, failures), partial(self._fail, learner, failures))
        for outage in self.scenario.outages:
            self._at(outage.start_s, partial(self._begin_outage, outage))
            self._at(outage.end_s, partial(self._end_outage, outage))
        self._at(math.inf, lambda: None)

    def _join(self, learner: SimulatedLearner) -> None:
        """Has a learner load the run's weights and attach."""
        bits = _WEIGHT_BITS * self._numel * self.scenario.fragment_count
        _, end_s = self._transfer(learner, "down", self.now_s, bits)
        self._at(end_s, partial(self._when_served, partial(self._attach, learner), learner))

    def _attach(self, learner: SimulatedLearner) -> None:
        region = learner.region
        if learner.is_attached or self._away[region.name] or not region.join_s <= self.now_s < region.leave_s:
            return
        learner.attach({name: fragment.version for name, fragment in self.state.fragments.items()})
        self._append(entries.SessionItem(learner.name, learner.session, region.name))

    def _leave(self, learner: SimulatedLearner) -> None:
        if learner.is_attached:
            learner.detach()
            self._append(entries.LeftItem(learner.name, learner.session))

    def _until_failure_s(self, learner: SimulatedLearner, failures: Random) -> float:
        return self.now_s + failures.expovariate(learner.region.chip_count / learner.region.chip_mtbf_s)

    def _fail(self, learner: SimulatedLearner, failures: Random) -> None:
        """Has a chip fail: the learner pauses, unless another failure has stopped it already."""
        if learner.is_training:
            learner.pause()
            self._at(self.now_s + learner.region.failure_loss_s, learner.resume)
        region = learner.region
        self.history.learners[learner.name].missing_s += (
            region.repair_s * min(region.slice_chip_count, region.chip_count) / region.chip_count
        )
        self._at(self._until_failure_s(learner, failures), partial(self._fail, learner, failures))

    def _begin_outage(self, outage: Outage) -> None:
        if outage.is_cut:
            self._cut[outage.place] += 1
            return
        self._away[outage.place] += 1
        for learner in self._learners.values():
            if learner.region.name == outage.place:
                learner.detach()
        if outage.place == SYNCER:
            self._start_syncer()

    def _end_outage(self, outage: Outage) -> None:
        (self._cut if outage.is_cut else self._away)[outage.place] -= 1
        for learner in self._learners.values():
            if learner.region.name == outage.place and not outage.is_cut:
                self._join(learner)
        if outage.place == SYNCER:
            self._start_syncer()
        if self._is_served:
            waiting, self._waiting = self._waiting, []
            for call in waiting:  # a call that failed is tried again within a pause
                pause_s = self._pauses.uniform(0.0, RetrySettings.longest_wait_s)
                self._at(self.now_s + pause_s, partial(self._when_served, *call))
            self._decide()

    # The syncer.

    @property
    def _is_served(self) -> bool:
        return not (self._away[SYNCER] or self._away[STORE])

    def _when_served(self, call: Callable[[], None], learner: SimulatedLearner | None = None) -> None:
        """Calls now, or when syncer and store are back and the learner, whose call it is, is not cut off."""
        if self._is_served and not (learner and self._cut[learner.region.name]):
            call()
        else:
            self._waiting.append((call, learner))

    def _told(self, learner: SimulatedLearner, call: Callable[[], None]) -> Callable[[], None]:
        """Returns what has a learner hear something as soon as it can, unless its session has ended by then."""
        session = learner.session

        def hear() -> None:
            if learner.is_attached and learner.session == session:
                call()

        return partial(self._when_served, hear, learner)

    def _start_syncer(self) -> None:
        """Starts a syncer, which knows the log alone."""
        self._engine, self._leases = RoundEngine(), Leases(self.now_s)
        self._reported_s: dict[str, float] = {}
        self._announced: dict[str, int] = {}

    def _begin_push(self, item: entries.AcceptedItem) -> None:
        fragment = self.state.fragments[item.fragment]
        learner = self._learners[item.learner]
        if self._is_served and not self._cut[learner.region.name] and learner.session == item.session:
            self._announce(item.fragment, fragment.version + (1 if fragment.closing is None else 2))

    def _arrive(self, learner: SimulatedLearner, item: entries.AcceptedItem) -> None:
        if learner.session != item.session or not learner.is_attached:
            return  # it was lost on its way
        (outcome,) = self._append(item)
        if outcome.rejection is None:
            learner.acknowledged(item.fragment)
        else:
            learner.returned(item.fragment, is_base_used=True)

    def _append(self, *items: entries.Item) -> tuple[Outcome, ...]:
        """Appends an entry to the log, has learners hear of it, and decides."""
        state = self.state
        place = (state.position + 1, state.spec.uid, state.head_digest)
        entry = entries.Entry(*place, "", "", 0.0, items, age_s=self.now_s)
        outcomes = apply_entry(state, entry, b"")
        for outcome in outcomes:
            for delta in outcome.decided:
                self._decided(delta)
            if isinstance(outcome.item, entries.CommittedItem) and outcome.rejection is None:
                self._committed(outcome.item.fragment, outcome.decided)
        self._decide()
        return outcomes

    def _decided(self, delta: DeltaState) -> None:
        item = delta.item
        learner, is_merged = self._learners[item.learner], delta.fate is entries.Fate.MERGED
        if not is_merged:
            self._announced.pop(item.fragment, None)
        if learner.is_attached and learner.session == item.session:
            merged = partial(learner.merged, item.fragment, delta.version)
            self._told(learner, merged if is_merged else partial(learner.returned, item.fragment, is_base_used=False))()

    def _committed(self, name: str, merged: Sequence[DeltaState]) -> None:
        fragment = self.state.fragments[name]
        commit = fragment.newest.commit
        assert commit is not None  # a merge made it
        close, counts = commit.close, defaultdict[str, float](float)
        for delta in merged:
            counts[delta.item.learner] += min(delta.item.step_count, close.length) / self.scenario.fragment_count
        for learner, step_count in counts.items():
            self.history.learners[learner].merged_step_count += step_count
        staleness = tuple(member.staleness for member in close.members)
        self.history.rounds.append(Round(self.now_s, close.participation, staleness, dict(counts)))
        for each in self._attached():
            self._told(each, partial(each.version_made, name, fragment.version))()
        if len(self.history.rounds) % _FORGET_EVERY == 0:
            self._at(self.now_s, self._forget)

    def _forget(self) -> None:
        """Has the fold forget old versions, as a replica's upkeep does."""
        self._append(*self._snapshots())
        self._append(entries.CheckpointItem(self.state.position, "", 0, "", oldest_versions(self.state)))

    def _snapshots(self) -> list[entries.SnapshotItem]:
        """Returns a snapshot of each fragment's newest version, of version 0 in a draft."""
        newest = {name: max(0, fragment.version) for name, fragment in self.state.fragments.items()}
        return [
            entries.SnapshotItem(
                name, version, str(version), (entries.ObjectRef(f"{name}/{version}", 0, 1, 1, ""),), ()
            )
            for name, version in newest.items()
        ]

    def _decide(self) -> None:
        """Does what the round engine decides, and asks it again when it wants."""
        if self._is_deciding or not self._is_served:
            return
        self._is_deciding = True
        while True:
            self._hear_reports()
            decisions = self._engine.decide(self.state, self._leases.view(self.state, self.now_s), self.now_s)
            for fragment, version in decisions.open_rounds:
                self._announce(fragment, version)
            for closing in decisions.merges:
                merge_s = self._figures.syncer_cpu_s * self._numel * len(closing.members)
                commit = partial(self._commit, closing, self._engine)
                self._at(self.now_s + merge_s, partial(self._when_served, commit))
            if not decisions.items:
                break
            self._engine.appended(self._append(*decisions.items))
        self._is_deciding = False
        wakes = (decisions.wake_at_s, self._leases.next_change_s(self.state, self.now_s))
        wake_s = min((at_s for at_s in wakes if at_s is not None), default=math.inf)
        if self.now_s < wake_s < self._wake_s:
            self._wake_s = wake_s
            self._at(wake_s, self._wake)

    def _wake(self) -> None:
        if self.now_s >= self._wake_s:
            self._wake_s = math.inf
            self._decide()

    def _hear_reports(self) -> None:
        """Renews the leases of the learners that would have reported by now."""
        interval_s = self.state.policy.lease_term_s / 3
        for learner in self._attached():
            is_due = self.now_s - self._reported_s.get(learner.name, -math.inf) >= interval_s
            if is_due and not self._cut[learner.region.name]:
                self._reported_s[learner.name] = self.now_s
                self._leases.renew(learner.name, learner.session, self.now_s, learner.report())

    def _announce(self, fragment: str, version: int) -> None:
        if self._announced.get(fragment, 0) < version:
            self._announced[fragment] = version
            for learner in self._attached():
                self._told(learner, partial(learner.round_opened, fragment, version, self.state.step_count))()

    def _commit(self, closing: entries.ClosedItem, engine: RoundEngine) -> None:
        """Commits a merge, unless the syncer that made it is gone."""
        if engine is self._engine:
            encoding, version = self.state.policy.update_encoding, closing.version
            made = (closing.fragment, version, closing.attempt)
            self._append(entries.CommittedItem(*made, (), encoding, str(version), _SCALARS))

    def _attached(self) -> Iterator[SimulatedLearner]:
        return (learner for learner in self._learners.values() if learner.is_attached)

    def _at(self, at_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at_s, next(self._order), event))

    def _transfer(self, learner: SimulatedLearner, way: str, ready_s: float, bits: float) -> tuple[float, float]:
        """Returns when a transfer begins and ends on a learner's link, after those before it."""
        begin_s = max(ready_s, self._free_s.get((learner.name, way), 0.0))
        end_s = begin_s + bits / (learner.region.bandwidth_bits_per_s or math.inf)
        self._free_s[learner.name, way] = end_s
        return begin_s, end_s
