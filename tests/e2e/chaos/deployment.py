"""Three replicas and six learners as processes on one store, with a link between each two, and an auditor."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Final, Self

from skerry import RunsClient, SkerryError
from skerry_syncer.store.objects.opening import open_objects
from tests.e2e.chaos.journal import Account
from tests.e2e.chaos.store_place import StorePlace
from tests.e2e.chaos.watcher import Watcher
from tests.simulation.disturbances import REPLICA_COUNT
from tests.simulation.learner_process import RUN
from tests.support.ports import free_ports
from tests.support.tcp_link import Link

# Seconds of a training step of each learner; one is three times slower.
_STEP_S: Final = (0.08, 0.09, 0.1, 0.12, 0.3, 0.1)
# Nothing happens to this one itself: its steps must take what they take in a calm.
UNTOUCHED: Final = len(_STEP_S) - 1
_DRAIN_GRACE_S: Final = 8
_CALL_S: Final = 8.0
_LOOK_EVERY_S: Final = 5.0
# Ends of processes that nobody asked for, after which the product is broken and the storm teaches nothing.
_MOST_COMPLAINTS: Final = 5
# What the product logs where it meets a defect of its own, and what Python prints of one.
_DEFECTS: Final = (
    "[error    ] the exchange has a defect",
    "Traceback (most recent call last)",
    'level=error event="run failed',
    'level=error event="call failed',
)
# The product's own command, with log checkpoints that come often enough for a short run.
_SERVE: Final = """
from skerry_syncer.store.log import checkpoints
checkpoints.CHECKPOINT_EVERY = 100
from skerry.cli.main import main
main()
"""


class Child:
    """One process after another under one name, whose output goes to NAME.log; all of them end with their parent."""

    def __init__(
        self, name: str, folder: Path, command: Callable[[int], Sequence[str]], env: Mapping[str, str] | None = None
    ) -> None:
        """`command` returns what Python is given for the process of this number, from 0."""
        self.name = name
        self.log = folder / f"{name}.log"
        self.is_stopped = False
        self.is_wanted = False  # whether it should be running
        self.is_ended = False  # whether it was told to end
        self._command = command
        self._env = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", **(env or {})}
        self._processes: list[subprocess.Popen[bytes]] = []  # all of them: older ones may still live

    @property
    def status(self) -> int | None:
        """The newest process's exit status, negative for a signal; None while it runs."""
        return self._processes[-1].poll()

    @property
    def is_alive(self) -> bool:
        """Whether the newest process has not ended."""
        return self.status is None

    def start(self) -> None:
        """Starts a process; one that is there already goes on beside it."""
        words = ["setpriv", "--pdeathsig=KILL", sys.executable, "-B", *self._command(len(self._processes))]
        with self.log.open("ab") as log:
            self._processes.append(
                subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._env)
            )
        self.is_stopped = self.is_ended = False
        self.is_wanted = True

    def send(self, number: signal.Signals) -> None:
        """Sends the newest process a signal, if it lives."""
        self._processes[-1].send_signal(number)
        self.is_stopped = number is signal.SIGSTOP

    def end(self, number: signal.Signals) -> None:
        """Ends the newest process by a signal, until it is wanted again."""
        self.is_wanted, self.is_ended = False, True
        self.send(number)

    def want(self) -> None:
        """Has a process be started once the newest has ended."""
        self.is_wanted = True

    def wake_all(self) -> None:
        """Continues every process of that name."""
        self.is_stopped = False
        for process in self._processes:
            process.send_signal(signal.SIGCONT)

    def kill_all(self) -> None:
        """Kills every process of that name and waits for them."""
        for process in self._processes:
            process.kill()
            process.wait()


class Deployment:
    """Everything that runs; to be used as an asynchronous context, which ends all of it."""

    def __init__(self, place: StorePlace, folder: Path, *, seed: int, say: Callable[[str], None]) -> None:
        self.place = place
        self.say = say
        self.watcher = Watcher(open_objects(place.url, new=True), seed=seed, say=say)
        self.faults: Counter[str] = Counter()
        self._folder = folder
        self._seed = seed
        self._ports = free_ports(REPLICA_COUNT)
        self.links = [[Link(port) for port in self._ports] for _ in _STEP_S]
        self.replicas = [
            Child(f"replica-{index}", folder, partial(self._serve, index), place.env(index))
            for index in range(REPLICA_COUNT)
        ]
        self.learners = [
            Child(f"learner-{index}", folder, partial(self._learn, index)) for index in range(len(_STEP_S))
        ]
        self._looked_s = 0.0

    async def __aenter__(self) -> Self:
        for link in chain(*self.links):
            await link.open(0)
        for child in (*self.replicas, *self.learners):
            child.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        for child in (*self.learners, *self.replicas):
            child.kill_all()
        for link in chain(*self.links):
            await link.close()

    def _serve(self, index: int, _: int) -> Sequence[str]:
        scratch = self._folder / f"scratch-{index}"
        return (
            "-c", _SERVE, "serve", "--listen", f"127.0.0.1:{self._ports[index]}", "--store", self.place.url,
            "--scratch", str(scratch), "--drain-grace", str(_DRAIN_GRACE_S), "--workers", "2",
        )  # fmt: skip

    def _learn(self, index: int, incarnation: int) -> Sequence[str]:
        name = f"learner-{index}"
        for account in self.watcher.accounts:
            if account.record.learner == name:
                account.record.is_newest, account.record.may_be_fenced = False, True
        path = self._folder / f"{name}-{incarnation}"
        self.watcher.accounts.append(Account(path, name, incarnation))
        settings = {
            "name": name,
            "journal": str(path),
            "target": ",".join(f"127.0.0.1:{link.port}" for link in self.links[index]),
            "step_s": _STEP_S[index],
            "seed": self._seed * 10_000 + index * 100 + incarnation,
        }
        return "-m", "tests.e2e.chaos.learner", json.dumps(settings)

    async def tend(self, for_s: float) -> None:
        """Supervises the processes and looks at the run, for so long."""
        await self.tend_until(lambda: False, for_s)

    async def tend_until(self, condition: Callable[[], bool], within_s: float) -> bool:
        """Supervises the processes and looks at the run until the condition holds; returns whether it did in time."""
        end_s = time.monotonic() + within_s
        while not condition():
            if time.monotonic() > end_s:
                return False
            self._supervise()
            if time.monotonic() > self._looked_s + _LOOK_EVERY_S:
                await self.watcher.look()
                self._looked_s = time.monotonic()
                self.say(str(self.watcher.counts()))
            await asyncio.sleep(0.1)
        return True

    def _supervise(self) -> None:
        """Starts again what ended though it should run, and complains where nobody had asked for its end."""
        for child in (*self.replicas, *self.learners):
            if child.is_wanted and not child.is_alive:
                if child.status and not child.is_ended:
                    self._complain(f"{child.name} ended by itself. status={child.status}, {child.log}")
                child.start()

    def _complain(self, complaint: str) -> None:
        self.watcher.complaints.append(complaint)
        if len(self.watcher.complaints) > _MOST_COMPLAINTS:  # nothing would come of the rest
            raise RuntimeError(f"processes end by themselves. first={self.watcher.complaints[0]}")

    async def end(self, within_s: float) -> None:
        """Has all learners send what is unsent and leave, closes the run, and drains the replicas."""
        await self._drain(self.learners, within_s)
        targets = ",".join(f"127.0.0.1:{port}" for port in self._ports)
        if not await asyncio.to_thread(_close_run, targets, time.monotonic() + within_s):
            self._complain("the run could not be closed in time")
        await self._drain(self.replicas, 2 * _DRAIN_GRACE_S)
        for child in (*self.learners, *self.replicas):
            lines = child.log.read_text(errors="replace").splitlines()
            for line in lines:
                if any(defect in line for defect in _DEFECTS):
                    self.watcher.complaints.append(f"{child.name}: {line[:400]}")

    async def _drain(self, children: Sequence[Child], within_s: float) -> None:
        end_s = time.monotonic() + within_s
        for child in children:
            child.end(signal.SIGTERM)
        while time.monotonic() < end_s and any(child.is_alive for child in children):
            await asyncio.sleep(0.2)
            await self.watcher.look()
        for child in children:
            if child.status != 0:
                self._complain(f"{child.name} did not leave in time. status={child.status}")


def _close_run(targets: str, until_s: float) -> bool:
    while time.monotonic() < until_s:
        try:
            with RunsClient(targets, timeout_s=_CALL_S) as client:
                client.close_run(RUN)
                return True
        except SkerryError:
            time.sleep(0.5)
    return False
