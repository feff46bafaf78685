"""Makes the disturbances of a plan happen to a world's processes, links and store."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from tests.simulation import disturbances as what
from tests.simulation.disturbances import Disturbance
from tests.simulation.learner_process import LearnerProcess
from tests.simulation.network import KEEPALIVE_S, Link, Network
from tests.simulation.operator_calls import Operator
from tests.simulation.processes import Process
from tests.simulation.replica_process import ReplicaProcess

# How long a drained replica may take to end, and how long to wait for a kill at an operation that may never come.
_DRAIN_S: Final = 25.0
_LATE_KILL_S: Final = 20.0
# Within which a learner's calls leave a replica that hangs, if another one answers: the client's five seconds, and what
# the network may take.
_LEAVE_S: Final = 12.0


class Director:
    """Makes a plan's disturbances happen, until `end`."""

    def __init__(
        self,
        replicas: Sequence[ReplicaProcess],
        learners: Sequence[LearnerProcess],
        *,
        network: Network,
        operator: Operator,
    ) -> None:
        """Takes the processes, links and operator that disturbances act on."""
        self._replicas = replicas
        self._learners = learners
        self._network = network
        self._operator = operator
        self._is_over = False
        self._operations: list[asyncio.Task[None]] = []
        self._doings: dict[type[Disturbance], Callable[[Any], None]] = {
            what.KillReplica: self._kill_replica,
            what.KillAllReplicas: self._kill_all,
            what.DrainReplica: self._drain,
            what.StopReplica: self._stop_replica,
            what.KillLearner: self._kill_learner,
            what.StopLearner: lambda one: self._stop(self._learner(one.learner).process, one.for_s),
            what.ReplaceLearner: self._replace_learner,
            what.Partition: self._block,
            what.HalfOpen: self._silence,
            what.StoreOutage: self._take_store,
            what.RollBackRun: lambda one: self._operate(self._operator.roll_back(one.share)),
            what.ChangePolicy: lambda one: self._operate(self._operator.change_policy(one.inner_step_count)),
            what.PoisonLearner: lambda one: self._learner(one.learner).poison(one.factor),
        }

    def happen(self, one: Disturbance) -> None:
        """Makes a disturbance happen now."""
        self._doings[type(one)](one)

    def end(self) -> None:
        """Cancels the later effects of disturbances that have happened, such as a restart after a kill."""
        self._is_over = True

    def dismiss_operator(self) -> None:
        """Cancels the operator's calls that are still being repeated."""
        for task in self._operations:
            task.cancel()

    def _later(self, delay_s: float, happen: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_later(delay_s, lambda: None if self._is_over else happen())

    def _operate(self, work: Any) -> None:
        self._operations.append(asyncio.create_task(work))

    def _learner(self, index: int) -> LearnerProcess:
        return self._learners[index % len(self._learners)]

    # Replicas.

    def _kill_replica(self, one: what.KillReplica) -> None:
        replica = self._replicas[one.replica]
        if one.operation_count:
            replica.kill_after(one.operation_count, before=one.before)
        else:
            replica.kill(with_reset=one.with_reset)
        self._later(one.down_s, lambda: _boot_if_dead(replica))
        self._later(one.down_s + _LATE_KILL_S, lambda: _boot_if_dead(replica))

    def _kill_all(self, one: what.KillAllReplicas) -> None:
        for replica in self._replicas:
            replica.kill(with_reset=True)
            self._later(one.down_s, partial(_boot_if_dead, replica))

    def _drain(self, one: what.DrainReplica) -> None:
        replica = self._replicas[one.replica]
        replica.drain()
        self._later(one.down_s + _DRAIN_S, lambda: _boot_if_dead(replica))

    def _stop_replica(self, one: what.StopReplica) -> None:
        stopped = self._replicas[one.replica]
        self._stop(stopped.process, one.for_s)
        others = [replica for replica in self._replicas if replica is not stopped]
        for learner in self._learners:
            is_so = _snapshot(stopped.process, learner.process)
            ways = [(other, self._way(learner, other)) for other in others]

            def check(learner: LearnerProcess = learner, is_so: Any = is_so, ways: Any = ways) -> None:
                if is_so != _snapshot(stopped.process, learner.process) or not learner.process.is_running:
                    return
                has_other = any(way is not None and way == self._way(learner, other) for other, way in ways)
                if has_other and learner.longest_call_s(stopped.index) >= _LEAVE_S:
                    self._network.defects.append(f"{learner.name} waits for a replica that hangs")

            self._later(_LEAVE_S, check)

    def _way(self, learner: LearnerProcess, replica: ReplicaProcess) -> Any:
        """Returns what stays the same while a learner can reach a replica all the time; None: it can't."""
        link, process = self._network.link(learner.name, replica.index), replica.process
        is_there = process is not None and process.is_running and not link.is_blocked
        is_there = is_there and self._network.endpoints[replica.index].is_accepting
        return (link.block_count, *_snapshot(process)) if is_there else None

    # Learners.

    def _kill_learner(self, one: what.KillLearner) -> None:
        learner = self._learner(one.learner)
        learner.kill(with_reset=one.with_reset)
        self._later(one.down_s, lambda: None if learner.process.is_alive else learner.boot())

    def _replace_learner(self, one: what.ReplaceLearner) -> None:
        learner = self._learner(one.learner)
        self._stop(learner.process, one.for_s)
        learner.boot()

    # Both.

    def _stop(self, process: Process | None, for_s: float) -> None:
        if process is None or not process.is_running:
            return
        process.stop()
        stop = process.stop_count
        self._later(for_s, process.go_on)
        self._later(KEEPALIVE_S, lambda: self._lose_stopped(process, stop))

    def _lose_stopped(self, process: Process, stop: int) -> None:
        """A process that is stopped answers no pings."""
        if not process.is_stopped or process.stop_count != stop:
            return
        for replica in self._replicas:
            if replica.process is process:
                self._network.lose(replica.index, with_reset=True)
        for learner in self._learners:
            if learner.process is process:
                for link in self._network.links(learner.name, None):
                    link.break_calls()

    # Links and store.

    def _block(self, one: what.Partition) -> None:
        only = None if one.learner is None else self._learner(one.learner).name
        for learner in [learner for learner in self._learners if only in (None, learner.name)]:
            for replica in [replica for replica in self._replicas if one.replica in (None, replica.index)]:
                self._block_link(self._network.link(learner.name, replica.index), one.for_s)

    def _block_link(self, link: Link, for_s: float) -> None:
        link.block()
        block = link.block_count

        def lose() -> None:
            if link.is_blocked and link.block_count == block:
                link.break_calls()

        self._later(for_s, link.heal)
        self._later(KEEPALIVE_S, lose)

    def _silence(self, one: what.HalfOpen) -> None:
        for link in self._network.links(self._learner(one.learner).name, None):
            for call in list(link.calls):
                self._network.make_half_open(call)

    def _take_store(self, one: what.StoreOutage) -> None:
        for replica in [replica for replica in self._replicas if one.replica in (None, replica.index)]:
            if replica.link is not None:
                replica.link.is_down = True
                self._later(one.for_s, replica.link.come_back)


def _snapshot(*processes: Process | None) -> tuple[Any, ...]:
    """Returns what stays the same while these processes are the same and are neither stopped nor continued."""
    return tuple((process, process and (process.is_running, process.stop_count)) for process in processes)


def _boot_if_dead(replica: ReplicaProcess) -> None:
    if not replica.is_alive:
        replica.boot()
