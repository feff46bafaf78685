"""Three replicas and six learners as processes on one store, with a relay between them, and an auditor beside them."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final, Self

from skerry import RunsClient, SkerryError
from tests.e2e.chaos import problem
from tests.e2e.chaos.children import Child
from tests.e2e.chaos.journal import Account, Appended
from tests.e2e.chaos.points import Deed, Mode, Moment, Operation, Point, points_of
from tests.e2e.chaos.relay import Relay
from tests.e2e.chaos.schedule import LEARNER_COUNT, STEP_S
from tests.e2e.chaos.store_place import StorePlace
from tests.e2e.chaos.watcher import Watcher
from tests.simulation.disturbances import REPLICA_COUNT, Disturbance
from tests.simulation.learner_process import RUN
from tests.support.ports import free_ports

_DRAIN_GRACE_S: Final = 8
# What the product logs where it meets a defect of its own, and what Python prints of one.
_DEFECTS: Final = (
    "[error    ] the exchange has a defect",
    "Traceback (most recent call last)",
    'level=error event="run failed',
    'level=error event="call failed',
)
_CALL_S: Final = 8.0
# How long a replica serves before it dies at a fault point: long enough to do something, as a start takes seconds.
_LIFE_S: Final = (8.0, 24.0)


class Replica:
    """One replica: its process, and which fault points of it were struck."""

    def __init__(self, index: int, port: int, *, place: StorePlace, folder: Path, seed: int) -> None:
        self.index = index
        self.port = port
        self.operations: set[Operation] = set()  # that it did
        self.struck: set[Point] = set()
        self.child = Child(f"replica-{index}", folder, env=place.env())
        self._mode = Mode.FINE
        self._is_striking = False
        self._url = place.url(folder.name)
        self._folder = folder
        self._seed = seed
        self._events = folder / f"replica-{index}.events"
        self._reported = Appended(self._events)
        self._random = random.Random(f"{seed}/{index}/deaths")

    def start(self) -> None:
        """Starts a process on the replica's port."""
        self.read_events()
        scratch = self._folder / f"scratch-{self.index}"
        scratch.mkdir(exist_ok=True)
        self.child.start(
            "tests.e2e.chaos.replica", str(self._events), f"{self._seed}/{self.index}/{self.child.start_count}",
            "--new-store", "--listen", f"127.0.0.1:{self.port}", "--store", self._url, "--scratch", str(scratch),
            "--drain-grace", str(_DRAIN_GRACE_S), "--workers", "2", "--log-level", "info",
        )  # fmt: skip
        self.set_mode(self._mode)
        self.strike(is_striking=self._is_striking)

    def set_mode(self, mode: Mode) -> None:
        """Changes what its way to the store is like."""
        self._mode = mode
        self.child.tell(mode=mode)

    def strike(self, *, is_striking: bool) -> None:
        """Has fault points that were not struck yet be struck, or no more of them."""
        self._is_striking = is_striking
        struck = [[*point.operation, point.moment, point.deed] for point in self.struck]
        self.child.tell(strikes=is_striking, struck=struck, death_in_s=self._random.uniform(*_LIFE_S))

    def read_events(self) -> None:
        """Takes note of what its process reported."""
        for event, verb, kind, *rest in self._reported.read():
            operation = Operation(verb, kind)
            if event == "seen":
                self.operations.add(operation)
            else:
                self.struck.add(Point(self.index, operation, Moment(rest[0]), Deed(rest[1])))


class Deployment:
    """Everything that runs; to be used as an asynchronous context, which ends all of it."""

    def __init__(
        self,
        place: StorePlace,
        folder: Path,
        *,
        seed: int,
        schedule: tuple[Disturbance, ...] = (),
        say: Callable[[str], None],
    ) -> None:
        folder.mkdir()
        self.place = place
        self.folder = folder
        self.seed = seed
        self.say = say
        ports = free_ports(REPLICA_COUNT + LEARNER_COUNT * REPLICA_COUNT)
        self.replicas = [
            Replica(index, port, place=place, folder=folder, seed=seed)
            for index, port in enumerate(ports[:REPLICA_COUNT])
        ]
        self.relay = Relay(LEARNER_COUNT, ports[:REPLICA_COUNT])
        self._relay_ports = ports[REPLICA_COUNT:]
        self.learners = [Child(f"learner-{index}", folder) for index in range(LEARNER_COUNT)]
        self.watcher = Watcher(place.open(folder.name), seed=seed, schedule=schedule, say=say)
        self.faults: Counter[str] = Counter()
        self._restart_at_s: dict[str, float] = {}

    async def __aenter__(self) -> Self:
        await self.relay.open(self._relay_ports)
        for replica in self.replicas:
            replica.start()
        for index in range(LEARNER_COUNT):
            self.start_learner(index)
        return self

    async def __aexit__(self, *_: object) -> None:
        for child in (*self.learners, *(replica.child for replica in self.replicas)):
            child.end()
        await self.relay.close()

    def start_learner(self, index: int) -> None:
        """Starts a new process under the learner's id."""
        child = self.learners[index]
        incarnation = child.start_count
        for account in self.watcher.accounts:
            if account.record.learner == child.name:
                account.record.is_newest, account.record.may_be_fenced = False, True
        path = self.folder / f"{child.name}-{incarnation}"
        self.watcher.accounts.append(Account(path, child.name, incarnation))
        settings = {
            "name": child.name,
            "journal": str(path),
            "target": self.relay.target(index),
            "step_s": STEP_S[index],
            "seed": self.seed * 10_000 + index * 100 + incarnation,
        }
        child.start("tests.e2e.chaos.learner", json.dumps(settings))

    def points(self) -> tuple[set[Point], set[Point]]:
        """Returns the fault points that were struck, and all of the operations that any replica did."""
        operations = set().union(*(replica.operations for replica in self.replicas))
        every = {point for replica in self.replicas for point in points_of(replica.index, operations)}
        return {point for replica in self.replicas for point in replica.struck} & every, every

    def supervise(self) -> None:
        """Starts again what ended though it should run, and complains where nobody had asked for its end."""
        now_s = time.monotonic()
        for replica in self.replicas:
            replica.read_events()
            self._restart(replica.child, now_s, -signal.SIGKILL, replica.start)
        for index, child in enumerate(self.learners):
            self._restart(child, now_s, 0, partial(self.start_learner, index))

    def _restart(self, child: Child, now_s: float, expected: int, start: Callable[[], None]) -> None:
        """Starts what should run a second after it was seen dead, as a supervisor waits."""
        if not child.is_wanted or child.is_alive:
            return
        if now_s >= self._restart_at_s.setdefault(child.name, now_s + 1.0):
            del self._restart_at_s[child.name]
            if child.status != expected:
                self.watcher.complaints.append(f"{child.name} ended by itself. status={child.status}, {child.log}")
            start()

    async def end(self, within_s: float) -> None:
        """Has all learners send what is unsent and leave, closes the run, and drains the replicas."""
        deadline_s = time.monotonic() + within_s
        for child in self.learners:
            child.is_wanted = False
            child.signal(signal.SIGTERM)
        while time.monotonic() < deadline_s and any(child.is_alive for child in self.learners):
            await asyncio.sleep(0.5)
            await self.watcher.look()
        for child in self.learners:
            if child.is_alive or child.status != 0:
                self.watcher.complaints.append(f"{child.name} could not leave in time. status={child.status}")
        targets = ",".join(f"127.0.0.1:{replica.port}" for replica in self.replicas)
        if not await asyncio.to_thread(_close_run, targets, deadline_s):
            self.watcher.complaints.append("the run could not be closed in time")
        for replica in self.replicas:
            replica.child.is_wanted = False
            replica.child.signal(signal.SIGTERM)
        while time.monotonic() < deadline_s + _DRAIN_GRACE_S and any(one.child.is_alive for one in self.replicas):
            await asyncio.sleep(0.2)
        for replica in self.replicas:
            replica.read_events()
            if replica.child.status != 0:
                status = replica.child.status
                self.watcher.complaints.append(f"{replica.child.name} did not drain. status={status}")
        self.watcher.complaints += self._failures()

    def _failures(self) -> list[str]:
        """Returns the lines of the processes' logs that tell of a defect."""
        return [
            f"{child.name}: {line[:400]}"
            for child in (*self.learners, *(replica.child for replica in self.replicas))
            if child.log.exists()
            for line in child.log.read_text(errors="replace").splitlines()
            if any(defect in line for defect in _DEFECTS)
        ]


def operate(port: int, number: int) -> None:
    """Lists the runs, makes one and deletes it, as an operator does beside the training; failures are no matter."""
    try:
        with RunsClient(f"127.0.0.1:{port}", timeout_s=_CALL_S) as client:
            client.list_runs()
            run = client.create_run(f"extra-{number}", problem.initial())
            client.delete_run(run.name, run.uid)
    except SkerryError:
        return


def _close_run(targets: str, deadline_s: float) -> bool:
    while time.monotonic() < deadline_s:
        try:
            with RunsClient(targets, timeout_s=_CALL_S) as client:
                client.close_run(RUN)
                return True
        except SkerryError:
            time.sleep(0.5)
    return False
