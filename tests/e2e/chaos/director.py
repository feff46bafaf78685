"""Makes the disturbances of a schedule happen to real processes, and strikes one fault point after another."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import time
from collections.abc import Callable
from functools import partial
from typing import Final

from tests.e2e.chaos import schedule as what
from tests.e2e.chaos.children import Child
from tests.e2e.chaos.deployment import Deployment, Replica, operate
from tests.e2e.chaos.points import Mode
from tests.simulation import disturbances as common
from tests.simulation.disturbances import Disturbance

_OPERATE_EVERY_S: Final = 4.0


class Director:
    """Happens things to one deployment."""

    def __init__(self, deployment: Deployment, *, may_drop: bool) -> None:
        """`may_drop`: whether the kernel can be told to drop packets, which it does in a network of our own."""
        self._on = deployment
        self._may_drop = may_drop
        self._endings: dict[object, tuple[asyncio.TimerHandle, Callable[[], object]]] = {}  # by what suffers
        self._operated_at_s = 0.0
        self._operator: asyncio.Task[None] | None = None
        self._operated = 0

    async def storm(self, plan: tuple[Disturbance, ...], duration_s: float) -> None:
        """Makes everything of the plan happen; returns after `duration_s`, when all of it has been healed."""
        began_s = time.monotonic()
        rest = list(plan)
        for replica in self._on.replicas:
            replica.strike(is_striking=True)
        while (now_s := time.monotonic() - began_s) < duration_s:
            while rest and rest[0].at_s <= now_s:
                one = rest.pop(0)
                self._on.say(f"{one}")
                self._on.faults[_name(one)] += 1
                self.happen(one)
            self._on.supervise()
            self._operate()
            await asyncio.sleep(0.1)
        await self._heal()

    def _operate(self) -> None:
        now_s = time.monotonic()
        if now_s - self._operated_at_s < _OPERATE_EVERY_S or (self._operator and not self._operator.done()):
            return
        self._operated_at_s = now_s
        self._operated += 1
        replica = self._on.replicas[self._operated % len(self._on.replicas)]
        self._operator = asyncio.create_task(asyncio.to_thread(operate, replica.port, self._operated))

    def happen(self, one: Disturbance) -> None:  # noqa: C901, PLR0912 - a case for each kind
        """Makes a disturbance happen."""
        on = self._on
        match one:
            case common.KillReplica():
                self._end_replica(on.replicas[one.replica], signal.SIGKILL, one.down_s)
            case common.KillAllReplicas():
                for replica in on.replicas:
                    self._end_replica(replica, signal.SIGKILL, one.down_s)
            case common.DrainReplica():
                self._end_replica(on.replicas[one.replica], signal.SIGTERM, one.down_s)
            case common.StopReplica():
                self._stop(on.replicas[one.replica].child, one.for_s)
            case common.KillLearner():
                self._end_learner(one.learner, signal.SIGKILL, one.down_s)
            case what.DrainLearner():
                self._end_learner(one.learner, signal.SIGTERM, one.down_s)
            case common.StopLearner():
                self._stop(on.learners[one.learner], one.for_s)
            case common.ReplaceLearner():
                if on.learners[one.learner].is_alive:
                    self._stop(on.learners[one.learner], one.for_s)
                    on.start_learner(one.learner)
            case common.Partition():
                for link in on.relay.of(one.learner, one.replica):
                    self._during(one.for_s, link, link.cut, link.heal)
            case common.HalfOpen():
                for link in on.relay.of(one.learner, None):
                    link.freeze()
            case what.Throttle():
                for link in on.relay.of(one.learner, None):
                    self._during(one.for_s, link, partial(link.slow_down, one.bytes_per_s, one.delay_s), link.heal)
            case what.DropPackets():
                self._drop_packets(one)
            case common.StoreOutage():
                for replica in on.replicas if one.replica is None else [on.replicas[one.replica]]:
                    self._set_mode(replica, Mode.DOWN, one.for_s)
            case what.StoreMode():
                self._set_mode(on.replicas[one.replica], Mode(one.mode), one.for_s)
            case what.DiskFull() if on.place.mount is not None:
                self._during(one.for_s, on.place, on.place.fill, on.place.empty)
            case what.DiskFull():
                for replica in on.replicas:
                    self._set_mode(replica, Mode.FULL, one.for_s)
            case what.StepClock():
                child = on.learners[one.learner or 0] if one.replica is None else on.replicas[one.replica].child
                child.tell(clock_offset_s=one.offset_s)
            case _:
                raise NotImplementedError(type(one))

    def _stop(self, child: Child, for_s: float) -> None:
        self._during(for_s, child, lambda: child.signal(signal.SIGSTOP), child.wake_all)

    def _drop_packets(self, one: what.DropPackets) -> None:
        if not self._may_drop:
            self._on.faults[f"{_name(one)} (not possible here)"] += 1
            return
        ports = ",".join(str(link.port) for link in self._on.relay.of(one.learner, None))
        rule = ["INPUT", "-p", "tcp", "-m", "multiport", "--ports", ports]
        if one.share < 1:
            rule += ["-m", "statistic", "--mode", "random", "--probability", str(one.share)]
        rule += ["-j", "DROP"]
        self._during(one.for_s, one, lambda: _iptables("-A", *rule), lambda: _iptables("-D", *rule))

    def _end_replica(self, replica: Replica, number: signal.Signals, down_s: float) -> None:
        self._end_for(replica.child, number, down_s, replica.start)

    def _end_learner(self, index: int, number: signal.Signals, down_s: float) -> None:
        self._end_for(self._on.learners[index], number, down_s, partial(self._on.start_learner, index))

    def _end_for(self, child: Child, number: signal.Signals, down_s: float, start_again: Callable[[], None]) -> None:
        if child.is_stopped or not child.is_alive:
            return

        def end() -> None:
            child.is_wanted = False
            child.signal(number)

        def start() -> None:
            if child.is_alive:  # it is still draining or sending
                self._during(1.0, child, _nothing, start)
            elif not child.is_wanted:
                start_again()

        self._during(down_s, child, end, start)

    def _set_mode(self, replica: Replica, mode: Mode, for_s: float) -> None:
        self._during(for_s, replica, lambda: replica.set_mode(mode), lambda: replica.set_mode(Mode.FINE))

    def _during(self, for_s: float, key: object, begin: Callable[[], object], end: Callable[[], object]) -> None:
        """Begins something now and ends it after `for_s`; what the same thing suffers already ends first."""
        self._end(key)
        begin()
        self._endings[key] = asyncio.get_running_loop().call_later(for_s, self._end, key), end

    def _end(self, key: object) -> None:
        if (found := self._endings.pop(key, None)) is not None:
            handle, end = found
            handle.cancel()
            end()

    async def _heal(self) -> None:
        """Ends every fault, and starts what is not there."""
        deadline_s = time.monotonic() + 40.0
        while self._endings and time.monotonic() < deadline_s:
            for key in list(self._endings):
                self._end(key)
            await asyncio.sleep(0.2)
        for link in self._on.relay.of(None, None):
            link.heal()
        for replica in self._on.replicas:
            replica.strike(is_striking=False)
            replica.set_mode(Mode.FINE)
        if self._operator is not None:
            await asyncio.wait([self._operator], timeout=30)
        for child in (*self._on.learners, *(replica.child for replica in self._on.replicas)):
            child.wake_all()
            child.is_wanted = True
        self._on.supervise()


def _nothing() -> None:
    return


def _iptables(*words: str) -> None:
    subprocess.run(["iptables", "--wait", *words], check=False, capture_output=True, timeout=10)


def _name(one: Disturbance) -> str:
    match one:
        case what.StoreMode():
            return f"store {one.mode}"
        case what.DropPackets():
            return "packets dropped, all" if one.share == 1 else "packets dropped, some"
    return type(one).__name__
