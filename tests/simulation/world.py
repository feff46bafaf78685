"""One simulated run from a seed: three replicas, four learners, one store, one network, and what goes wrong with them.

The history has three parts. *Under fire* everything fails as the seed says. *Calm*: nothing fails any more, what was
killed is back, and within a bound everything must move again. *The end*: learners send what is unsent and leave, and
the run is closed. Then the auditor looks at what is left.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

from skerry.wire.codecs import Codec, Compressor, Encoding
from skerry.wire.policy import Policy
from skerry_syncer.store.errors import StoreError
from skerry_syncer.store.log.entries import Fate
from skerry_syncer.store.log.run_log import RunLog
from skerry_syncer.store.log.state import RunState
from tests.simulation.director import Director
from tests.simulation.disturbances import REPLICA_COUNT, Disturbance, Mix, draw
from tests.simulation.evidence import Evidence, gather, open_run
from tests.simulation.learner_process import LearnerProcess
from tests.simulation.network import CALM_NETWORK, KEEPALIVE_S, Endpoint, Network
from tests.simulation.operator_calls import Operator
from tests.simulation.processes import Process, ProcessLoop
from tests.simulation.replica_process import ReplicaProcess, replica_settings
from tests.simulation.shared_store import SharedStore
from tests.support.heard_logs import logs_told_to

# Under fire; long enough that a learner 10 times slower takes part in some rounds.
FIRE_S: Final = 100.0
# Within which, once nothing fails, every fragment moves and all work is merged: a ping that stays unanswered, the
# longest pause that a server asks for (30 s for a full store), and two of the slowest learner's rounds.
CALM_S: Final = KEEPALIVE_S + 40.0 + 60.0
# Of what is kept, where little is: a few rounds.
KEPT_S: Final = 15.0
# For the end: the slowest learner's last step, and all that is left to be merged.
END_S: Final = 300.0


@dataclass(frozen=True)
class Plan:
    """What a run will be: all of it follows from a seed and a mix."""

    seed: int
    mix: Mix
    disturbances: tuple[Disturbance, ...]
    policy: Policy


def plan(seed: int, mix: Mix) -> Plan:
    """Returns the plan of one run."""
    source = random.Random(f"{seed}/{mix.name}/plan")
    encoding = Encoding(codec=mix.delta_codec, block=16, compressor=Compressor.ZSTD)
    policy = Policy(
        inner_step_count=source.choice((6, 8, 12)),
        quorum_count=mix.quorum_count,
        delta_encoding=encoding,
        update_encoding=replace(encoding, codec=Codec.INT4),
        lease_term_s=6.0,
        max_staleness=source.choice((6, 10)),
        snapshot_ratio=mix.snapshot_ratio,
    )
    if mix.kept_version_count is not None:
        policy = replace(policy, kept_version_count=mix.kept_version_count, kept_hours=KEPT_S / 3600, kept_day_count=1)
    return Plan(seed, mix, draw(mix, source, FIRE_S), policy)


class World:
    """Everything of one run; made and used inside one `ProcessLoop`."""

    def __init__(self, plan: Plan) -> None:
        """Builds it; nothing runs yet."""
        seed = f"{plan.seed}/{plan.mix.name}"
        self.plan = plan
        self.event_count = 0
        self.store = SharedStore(self.count)
        self.endpoints = [Endpoint() for _ in range(REPLICA_COUNT)]
        self.network = Network(self.endpoints, plan.mix.network, random.Random(f"{seed}/network"))
        self.replicas = [
            ReplicaProcess(
                index,
                self.network,
                self.store,
                plan.mix.store,
                seed=f"{seed}/replica-{index}",
                settings=replica_settings(collects=plan.mix.kept_version_count is not None),
            )
            for index in range(REPLICA_COUNT)
        ]
        self.learners = [
            LearnerProcess(
                f"learner-{index}",
                self.network,
                plan.policy,
                step_s=step_s,
                seed=f"{seed}/learner-{index}",
                count=self.count,
                lane_bytes=plan.mix.lane_bytes,
            )
            for index, step_s in enumerate(plan.mix.step_s)
        ]
        self.calm_s = CALM_S
        self.calm_begin_count: int | None = None
        self.calm_end_count = 0
        self.complaints: list[str] = []  # failures that were noticed while it ran
        self._log: RunLog | None = None
        self.operator = Operator(self.network, self.count, random.Random(f"{seed}/operator"))
        self._director = Director(self.replicas, self.learners, self.network, self.operator)

    def count(self) -> int:
        """Counts an event and returns its number."""
        self.event_count += 1
        return self.event_count

    async def run(self) -> Evidence:
        """Runs the plan and returns the evidence."""
        for replica in self.replicas:
            replica.boot()
        for learner in self.learners:
            learner.boot()
        await self._under_fire()
        if not self.plan.mix.closes_under_fire:
            self._calm_down()
            await self._calm()
        await self._end()
        return await gather(self)

    def processes(self) -> Iterator[Process]:
        """Yields every process that was started."""
        for replica in self.replicas:
            yield from replica.processes
        for learner in self.learners:
            yield from learner.processes

    # The parts of the history.

    async def _under_fire(self) -> None:
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        for disturbance in self.plan.disturbances:
            await asyncio.sleep(max(0.0, start_s + disturbance.at_s - loop.time()))
            self._director.happen(disturbance)
        await asyncio.sleep(max(0.0, start_s + FIRE_S - loop.time()))

    def _calm_down(self) -> None:
        """Ends every fault, and notes how far each learner has trained."""
        self._director.end()
        self.network.faults = CALM_NETWORK
        for link in self.network.links(None, None):
            link.heal()
        for replica in self.replicas:
            replica.calm_store()
            if replica.process is not None and replica.process.is_stopped:
                replica.process.go_on()
            if not replica.is_alive:
                replica.boot()
        for learner in self.learners:
            for process in learner.processes:
                if process.is_alive and process.is_stopped:
                    process.go_on()
            if not learner.process.is_alive:
                learner.boot()
            for record in learner.records:
                record.steps_when_calm = record.step_count

    async def _calm(self) -> None:
        """Waits until everything has moved, or the bound."""
        self.calm_begin_count = self.event_count
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self.calm_s
        before: dict[str, int] | None = None
        while loop.time() < deadline_s:
            await asyncio.sleep(1.0)
            state = await self._state_of_run()
            if state is None:
                continue
            versions = {name: fragment.version for name, fragment in state.fragments.items()}
            before = before or versions
            if all(versions[name] > before[name] for name in versions) and self._is_all_merged(state):
                break
        self.calm_end_count = self.event_count

    async def _state_of_run(self) -> RunState | None:
        """Returns what the log in the store says now; None before the run is created, or where nobody can read it."""
        try:
            if self._log is None:
                self._log = (await open_run(self.store.objects)).log
            await self._log.tail()
        except StoreError:
            return None  # a log that can't be read is the auditor's to report
        return self._log.state

    def _is_all_merged(self, state: RunState) -> bool:
        """Whether what was trained when the calm began is merged; an estimate; the auditor checks it exactly."""
        merged: dict[tuple[str, str], int] = {}
        for delta in state.deltas.values():
            if delta.fate is Fate.MERGED:
                key = (delta.item.session, delta.item.fragment)
                merged[key] = max(merged.get(key, 0), delta.item.last_step)
        return all(
            merged.get((learner.record.session, name), 0) >= (learner.record.steps_when_calm or 0)
            for learner in self.learners
            for name in state.fragments
            if learner.record.failure is None
        ) and all(learner.exchange is not None for learner in self.learners)

    async def _end(self) -> None:
        """Has all learners send what is unsent and leave, then closes the run."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + END_S
        if self.plan.mix.closes_under_fire:
            await self._close_run()
            self._calm_down()
        else:
            await self._flush_and_train_on(deadline_s)
        for learner in self.learners:
            learner.is_training = False
        while (staying := self._staying()) and loop.time() < deadline_s:
            await asyncio.sleep(1.0)
        self.complaints += [f"{learner.name} could not leave in time" for learner in staying]
        self._director.dismiss_operator()
        if not self.plan.mix.closes_under_fire:
            self.complaints += [
                f"{learner.name} could not send its last steps, though nothing failed"
                for learner in self.learners
                if learner.record.has_left and not learner.record.has_flushed and learner.record.failure is None
            ]
            await self._close_run()

    async def _flush_and_train_on(self, deadline_s: float) -> None:
        """Has all learners flush, train a step, and flush again, while the first delta may wait for its round."""
        loop = asyncio.get_running_loop()
        for learner in self.learners:
            learner.flush_count = 2
        while any(learner.flush_count for learner in self.learners) and loop.time() < deadline_s:
            await asyncio.sleep(1.0)
        self.complaints += [
            f"{learner.name} could not flush while it trained, though nothing failed"
            for learner in self.learners
            if learner.record.failed_flush_count or learner.flush_count
        ]

    def _staying(self) -> list[LearnerProcess]:
        """Returns the learners that have not left; one that the closed run did not let in has nothing to leave."""
        return [
            learner
            for learner in self.learners
            if not learner.record.has_left and getattr(learner.record.failure, "reason", "") != "RUN_CLOSED"
        ]

    async def _close_run(self) -> None:
        if not await self.operator.close_run(END_S):
            self.complaints.append("the run could not be closed in time")


def live(seed: int, mix: Mix) -> Evidence:
    """Returns the evidence of one run."""
    with _quiet_collector(), _captured_logs() as failures, asyncio.Runner(loop_factory=ProcessLoop) as runner:

        async def main() -> Evidence:
            world = World(plan(seed, mix))
            try:
                evidence = await world.run()
            finally:
                for process in world.processes():
                    process.bury()
            return evidence

        evidence = runner.run(main())
    return replace(evidence, complaints=(*evidence.complaints, *failures))


@contextmanager
def _quiet_collector() -> Iterator[None]:
    """Turns the garbage collector off: collecting a killed process's coroutines would run their `finally` blocks."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def _captured_logs() -> Iterator[list[str]]:
    """Drops the services' logs, but for those that say that something failed by a defect."""
    failures: list[str] = []

    def keep(line: dict[str, Any]) -> None:
        if line["event"].startswith(("run failed", "call failed")):
            failures.append(f"{line['event']}. cause={line.get('exc_info')!r}")

    with logs_told_to(keep, logging.ERROR):
        yield failures
