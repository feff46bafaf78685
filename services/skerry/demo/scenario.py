"""The demo's course: start, kill, restart, end. Every time that it reports is measured."""

from __future__ import annotations

import json
import shutil
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from skerry.demo.follow import MetricsFollower
from skerry.demo.plan import DemoPlan, IslandPlan
from skerry.demo.processes import Child, ChildError, Nursery

_POLL_S: Final = 0.05
_POLL_BEFORE_KILL_S: Final = 0.002
_START_TIMEOUT_S: Final = 60.0
_END_TIMEOUT_S: Final = 60.0
_MANY_STEPS: Final = 1_000_000


@dataclass(frozen=True)
class DemoEvent:
    """Something that the demo did, for the page's list."""

    unix_s: float
    text: str


@dataclass
class Timeline:
    """When what happened, in seconds since 1970; `None` until it has."""

    started: float | None = None
    learner_killed: float | None = None
    learner_back: float | None = None
    syncer_killed: float | None = None
    syncer_back: float | None = None
    ended: float | None = None
    closed: float | None = None
    events: list[DemoEvent] = field(default_factory=list)


class View(Protocol):
    """What shows the demo while it runs."""

    def refresh(self, scenario: Scenario) -> None:
        """Show how it stands; called often."""
        ...


class Scenario:
    """One course of the demo through real processes."""

    def __init__(self, plan: DemoPlan, nursery: Nursery, *, close_run: Callable[[str, str], None], view: View) -> None:
        """Be ready to run `plan`; `close_run(target, run)` ends the run over the network."""
        self.plan = plan
        self.phase = "preparing"
        self.timeline = Timeline()
        self.single = MetricsFollower(self._work_directory("single") / "metrics.jsonl")
        self.learners = {
            island.learner_id: MetricsFollower(self._work_directory(island.learner_id) / "metrics.jsonl")
            for island in plan.islands
        }
        self.away: set[str] = set()
        self._nursery = nursery
        self._close_run = close_run
        self._view = view
        self._children: dict[str, Child] = {}
        self._port = 0

    def run(self) -> None:
        """Train the single learner, then the islands through both outages, and close the run.

        Raises:
            ChildError: a process ended that shouldn't have, or didn't when it should.
        """
        self._prepare()
        self._train_single()
        self._start_islands()
        self._wait_until(self.plan.learner_killed_at_step, _POLL_BEFORE_KILL_S)
        self._kill_learner()
        self._wait_until(self.plan.learner_back_at_step, _POLL_S)
        self._bring_learner_back()
        self._wait_until(self.plan.syncer_killed_at_step, _POLL_S)
        self._kill_syncer()
        self._wait_until(self.plan.syncer_back_at_step, _POLL_S)
        self._bring_syncer_back()
        self._wait_until(self.plan.step_count, _POLL_BEFORE_KILL_S)
        self._close()
        self._end()

    def checkpoint_of_single(self) -> Path:
        """Where the single learner left its weights."""
        return self._work_directory("single") / "checkpoint.pt"

    def _prepare(self) -> None:
        # Only what earlier demos made: the directory may be anybody's.
        for name in ("store", "learners", "logs", "exports"):
            shutil.rmtree(self.plan.directory / name, ignore_errors=True)
        self.plan.directory.mkdir(parents=True, exist_ok=True)
        training = self.plan.training
        policy = {
            "inner_step_count": training.inner_step_count,
            "lease_term_s": training.lease_term_s,
        }
        self._policy_path.write_text(json.dumps(policy))

    def _train_single(self) -> None:
        self.phase = "training one learner alone, to compare with"
        child = self._nursery.start("single", [*self._learn_arguments(self._single_plan), "--alone", "--threads", "1"])
        while child.is_running:
            self._look(_POLL_S)
        child.expect_success(_END_TIMEOUT_S)
        self._look(0)

    def _start_islands(self) -> None:
        self.phase = "training on three islands"
        self._start_syncer()
        for island in self.plan.islands:
            self._start_learner(island)
        while not all(follower.lines for follower in self.learners.values()):
            self._look(_POLL_S)
            self._check_all_alive()
        # From the first step of the first island: what came before is Python starting.
        self.timeline.started = min(follower.lines[0].unix_s for follower in self.learners.values())
        self._note("three islands train", self.timeline.started)

    def _kill_learner(self) -> None:
        """Kill it just after a step of its own, when as little as possible is acknowledged but not in its metrics."""
        name = self.plan.killed_learner_id
        while not self.learners[name].poll():
            self._check_all_alive()
            time.sleep(_POLL_BEFORE_KILL_S)
        self._children[name].kill()
        self.timeline.learner_killed = time.time()
        self.away.add(name)
        self._note(f"SIGKILL for {name} at its step {self.learners[name].step}", self.timeline.learner_killed)

    def _bring_learner_back(self) -> None:
        name = self.plan.killed_learner_id
        island = next(island for island in self.plan.islands if island.learner_id == name)
        follower = self.learners[name]
        killed = follower.lines[-1].attempt
        self._start_learner(island)
        self.away.discard(name)
        while follower.lines[-1].attempt == killed:
            self._look(_POLL_S)
            self._check_all_alive()
        # Back is the moment of its first new step, not of its start.
        self.timeline.learner_back = next(line.unix_s for line in follower.lines if line.attempt != killed)
        self._note(f"{name} is back, from its checkpoint at step {follower.step - 1}", self.timeline.learner_back)

    def _kill_syncer(self) -> None:
        self._children["syncer"].kill()
        self.timeline.syncer_killed = time.time()
        self.away.add("syncer")
        self._note("SIGKILL for the syncer; the islands train on", self.timeline.syncer_killed)

    def _bring_syncer_back(self) -> None:
        self._start_syncer()
        self.timeline.syncer_back = time.time()
        self.away.discard("syncer")
        self._note("a new syncer serves from the store", self.timeline.syncer_back)

    def _close(self) -> None:
        """Close the run while everybody trains: what is on its way then is refused, and counted by nobody."""
        self.phase = "closing the run"
        self.timeline.ended = time.time()
        self._note(f"{self.plan.timekeeper.learner_id} has taken its steps: the run is closed", self.timeline.ended)
        self._close_run(self._target, self.plan.run)
        self.timeline.closed = time.time()
        self._note("every delta has its fate", self.timeline.closed)

    def _end(self) -> None:
        """Let the islands leave, as they do when they hear that their run is closed."""
        self.phase = "letting the islands leave"
        for island in self.plan.islands:
            self._wait_for_end(self._children[island.learner_id])
        syncer = self._children["syncer"]
        syncer.ask_to_stop()
        self._wait_for_end(syncer)
        self.away.add("syncer")

    def _wait_until(self, step: int, poll_s: float) -> None:
        """Watch until the timekeeper has taken `step` steps.

        With a short `poll_s` this returns within it of the step's end.
        """
        follower = self.learners[self.plan.timekeeper.learner_id]
        while follower.step < step:
            is_near = follower.step >= step - 2
            self._look(poll_s if is_near else _POLL_S)
            self._check_all_alive()

    def _wait_for_end(self, child: Child) -> None:
        deadline = time.monotonic() + _END_TIMEOUT_S
        while child.is_running and time.monotonic() < deadline:
            self._look(_POLL_S)
        child.expect_success(0.1)

    def _look(self, wait_s: float) -> None:
        for follower in (self.single, *self.learners.values()):
            follower.poll()
        self._view.refresh(self)
        time.sleep(wait_s)

    def _check_all_alive(self) -> None:
        for name, child in self._children.items():
            if name in self.away or child.is_running:
                continue
            message = f"{name} ended too early. log={child.log_path}\n{child.log_tail()}"
            raise ChildError(message)

    def _start_syncer(self) -> None:
        port_path = self.plan.directory / "store-port"
        port_path.unlink(missing_ok=True)
        arguments = ["serve", "--listen", f"127.0.0.1:{self._port}", "--store", self.plan.store_url]
        child = self._nursery.start("syncer", [*arguments, "--port-file", str(port_path)])
        self._children["syncer"] = child
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not (port_path.exists() and port_path.read_text().strip() and self._is_listening(port_path)):
            if not child.is_running or time.monotonic() > deadline:
                message = f"the syncer didn't start. log={child.log_path}\n{child.log_tail()}"
                raise ChildError(message)
            self._look(_POLL_S)
        self._port = int(port_path.read_text())

    @staticmethod
    def _is_listening(port_path: Path) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", int(port_path.read_text()))) == 0

    def _start_learner(self, island: IslandPlan) -> None:
        arguments = [
            *self._learn_arguments(island),
            *("--target", self._target, "--run", self.plan.run, "--region", island.region),
            *("--slowdown", str(island.slowdown), "--policy", str(self._policy_path), "--threads", "1"),
        ]
        self._children[island.learner_id] = self._nursery.start(island.learner_id, arguments)

    def _learn_arguments(self, island: IslandPlan) -> list[str]:
        training = self.plan.training
        # The islands go on until they hear that the run is closed.
        is_single = island.learner_id == self._single_plan.learner_id
        return [
            *("learn", "--learner-id", island.learner_id, "--model", training.model, "--shard", island.shard),
            *("--steps", str(self.plan.step_count if is_single else _MANY_STEPS)),
            *("--horizon", str(self.plan.step_count), "--learning-rate", str(training.learning_rate)),
            *("--warmup", str(training.warmup_steps), "--batch", str(training.batch_size)),
            *("--eval-every", str(max(1, round(training.evaluate_every / island.slowdown)))),
            *("--eval-windows", str(training.evaluation_window_count), "--checkpoint-every", "50"),
            *("--seed", str(training.seed), "--device", "cpu"),
            *("--work-dir", str(self._work_directory(island.learner_id))),
        ]

    @property
    def _single_plan(self) -> IslandPlan:
        # All of the data: the comparison must not be won by what the single learner never saw.
        return IslandPlan("single", "", "1/1")

    @property
    def _target(self) -> str:
        return f"127.0.0.1:{self._port}"

    @property
    def _policy_path(self) -> Path:
        return self.plan.directory / "policy.json"

    def _work_directory(self, learner_id: str) -> Path:
        return self.plan.directory / "learners" / learner_id

    def _note(self, text: str, unix_s: float) -> None:
        self.timeline.events.append(DemoEvent(unix_s, text))
