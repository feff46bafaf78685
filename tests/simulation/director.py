"""Makes the disturbances of a plan happen to a world's processes, links and store."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

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


@dataclass(eq=False)
class Director:
    """Makes a plan's disturbances happen to processes, links and operator, until `end`."""

    replicas: Sequence[ReplicaProcess]
    learners: Sequence[LearnerProcess]
    network: Network
    operator: Operator
    _is_over: bool = False
    _operations: list[asyncio.Task[None]] = field(default_factory=list)

    def happen(self, disturbance: Disturbance) -> None:
        """Makes a disturbance happen now."""
        getattr(self, disturbance.kind)(**disturbance.arguments)

    def end(self) -> None:
        """Cancels the later effects of disturbances that have happened, such as a restart after a kill."""
        self._is_over = True

    def dismiss_operator(self) -> None:
        """Cancels the operator's calls that are still being repeated."""
        for task in self._operations:
            task.cancel()

    def _later(self, delay_s: float, happen: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_later(delay_s, lambda: None if self._is_over else happen())

    def _learner(self, index: int) -> LearnerProcess:
        return self.learners[index % len(self.learners)]

    # Replicas.

    def kill_replica(self, number: int, down_s: float, *, with_reset: bool) -> None:
        """SIGKILL; without a reset its host is gone too, and nobody resets connections."""
        self.replicas[number].kill(with_reset=with_reset)
        self._boot_later(self.replicas[number], down_s, down_s + _LATE_KILL_S)

    def kill_replica_at_operation(self, number: int, down_s: float, *, operation_count: int, before: bool) -> None:
        """SIGKILL at a later store operation, which takes effect unless it dies `before` that is sent."""
        self.replicas[number].kill_after(operation_count, before=before)
        self._boot_later(self.replicas[number], down_s, down_s + _LATE_KILL_S)

    def kill_all(self, down_s: float) -> None:
        """SIGKILL to all at once."""
        for replica in self.replicas:
            replica.kill(with_reset=True)
            self._boot_later(replica, down_s)

    def drain(self, number: int, down_s: float) -> None:
        """SIGTERM."""
        self.replicas[number].drain()
        self._boot_later(self.replicas[number], down_s + _DRAIN_S)

    def _boot_later(self, replica: ReplicaProcess, *delays_s: float) -> None:
        for delay_s in delays_s:
            self._later(delay_s, lambda: None if replica.is_alive else replica.boot())

    def stop_replica(self, number: int, for_s: float) -> None:
        """SIGSTOP, and SIGCONT after `for_s`; within `_LEAVE_S` the calls of learners leave it."""
        stopped = self.replicas[number]
        self._stop(stopped.process, for_s)
        others = [replica for replica in self.replicas if replica is not stopped]
        for learner in self.learners:
            is_so = _snapshot(stopped.process, learner.process)
            ways = [(other, self._way(learner, other)) for other in others]

            def check(learner: LearnerProcess = learner, is_so: Any = is_so, ways: Any = ways) -> None:
                if is_so != _snapshot(stopped.process, learner.process) or not learner.process.is_running:
                    return
                has_other = any(way is not None and way == self._way(learner, other) for other, way in ways)
                if has_other and learner.longest_call_s(stopped.index) >= _LEAVE_S:
                    self.network.defects.append(f"{learner.name} waits for a replica that hangs")

            self._later(_LEAVE_S, check)

    def _way(self, learner: LearnerProcess, replica: ReplicaProcess) -> Any:
        """Returns what stays the same while a learner can reach a replica all the time; None: it can't."""
        link, process = self.network.link(learner.name, replica.index), replica.process
        is_there = process is not None and process.is_running and not link.is_blocked
        is_there = is_there and self.network.endpoints[replica.index].is_accepting
        return (link.block_count, *_snapshot(process)) if is_there else None

    # Learners.

    def kill_learner(self, number: int, down_s: float, *, with_reset: bool) -> None:
        """SIGKILL; a new process of the same id comes after `down_s`."""
        learner = self._learner(number)
        learner.kill(with_reset=with_reset)
        self._later(down_s, lambda: None if learner.process.is_alive else learner.boot())

    def stop_learner(self, number: int, for_s: float) -> None:
        """SIGSTOP, and SIGCONT after `for_s`."""
        self._stop(self._learner(number).process, for_s)

    def replace_learner(self, number: int, for_s: float) -> None:
        """SIGSTOP; a new process takes its id; SIGCONT wakes the old one `for_s` later."""
        learner = self._learner(number)
        self._stop(learner.process, for_s)
        learner.boot()

    def poison(self, number: int, factor: float) -> None:
        """A learner's weights are multiplied: by infinity, or by so much that its delta is an outlier."""
        self._learner(number).poison = factor

    # The operator.

    def roll_back(self, share: float) -> None:
        """The run is rolled back, to this share of its log's length."""
        self._operations.append(asyncio.create_task(self.operator.roll_back(share)))

    def eject(self, number: int, for_s: float) -> None:
        """A learner is ejected, readmitted `for_s` later, and started again."""
        learner = self._learner(number)

        async def come_back() -> None:
            if await self.operator.eject(learner.name, for_s):
                learner.kill(with_reset=True)
                learner.boot()

        self._operations.append(asyncio.create_task(come_back()))

    def change_policy(self, inner_step_count: int) -> None:
        """H is changed."""
        self._operations.append(asyncio.create_task(self.operator.change_policy(inner_step_count)))

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
        for replica in self.replicas:
            if replica.process is process:
                self.network.lose(replica.index, with_reset=True)
        for learner in self.learners:
            if learner.process is process:
                for link in self.network.links(learner.name, None):
                    link.break_calls()

    # Links and store.

    def partition(self, learner: int | None, replica: int | None, for_s: float) -> None:
        """No way between a learner and a replica; None means all of them."""
        name = None if learner is None else self._learner(learner).name
        for trainee in [trainee for trainee in self.learners if name in (None, trainee.name)]:
            for index in [each.index for each in self.replicas if replica in (None, each.index)]:
                self._block_link(self.network.link(trainee.name, index), for_s)

    def _block_link(self, link: Link, for_s: float) -> None:
        link.block()
        block = link.block_count

        def lose() -> None:
            if link.is_blocked and link.block_count == block:
                link.break_calls()

        self._later(for_s, link.heal)
        self._later(KEEPALIVE_S, lose)

    def half_open(self, number: int) -> None:
        """A learner's connections become half-open: nothing arrives any more, and neither end is told."""
        for link in self.network.links(self._learner(number).name, None):
            for call in list(link.calls):
                self.network.make_half_open(call)

    def store_outage(self, replica: int | None, for_s: float) -> None:
        """The store fails every operation; of one replica, or of all."""
        for link in [each.link for each in self.replicas if replica in (None, each.index)]:
            if link is not None:
                link.is_down = True
                self._later(for_s, link.come_back)


def _snapshot(*processes: Process | None) -> tuple[Any, ...]:
    """Returns what stays the same while these processes are the same and are neither stopped nor continued."""
    return tuple((process, process and (process.is_running, process.stop_count)) for process in processes)
