"""The course of the demo: start, kill, restart and end real processes, and record when each of it happened."""

from __future__ import annotations

import json
import shutil
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from skerry import RunsClient
from skerry_demo.follow import MetricsFollower
from skerry_demo.plan import DemoPlan, LearnerPlan
from skerry_demo.processes import Child, ChildError, Nursery

_POLL_S: Final = 0.05
_POLL_BEFORE_KILL_S: Final = 0.002
_START_TIMEOUT_S: Final = 60.0
_END_TIMEOUT_S: Final = 60.0
_UNLIMITED_STEPS: Final = 1_000_000

Moment = Literal["started", "learner_killed", "learner_back", "syncer_killed", "syncer_back", "ended", "closed"]


@dataclass(frozen=True)
class DemoEvent:
    """Something that the demo did."""

    unix_s: float
    text: str


@dataclass
class Timeline:
    """The events of the demo so far, in order."""

    events: dict[Moment, DemoEvent] = field(default_factory=dict)

    def unix_s(self, moment: Moment) -> float:
        """When it happened, in seconds since 1970; raises KeyError if it has not."""
        return self.events[moment].unix_s

    def since_start_s(self, unix_s: float) -> float:
        """Seconds since the learners' first step."""
        return unix_s - self.unix_s("started")

    def at_s(self, moment: Moment) -> float:
        """When it happened, in seconds since the learners' first step."""
        return self.since_start_s(self.unix_s(moment))


class Scenario:
    """One course of the demo."""

    def __init__(self, plan: DemoPlan, nursery: Nursery, *, show: Callable[[Scenario], None]) -> None:
        """Run `plan` with children of `nursery`; `show` is called often, to display the progress."""
        self.plan = plan
        self.phase = "preparing"
        self.timeline = Timeline()
        self.single = MetricsFollower(self._work_directory(plan.baseline) / "metrics.jsonl")
        self.learners = {
            learner.learner_id: MetricsFollower(self._work_directory(learner) / "metrics.jsonl")
            for learner in plan.learners
        }
        self.killed: set[str] = set()
        self._nursery = nursery
        self._show = show
        self._children: dict[str, Child] = {}
        self._port = 0

    def run(self) -> None:
        """Train the baseline, then the learners through both outages, and close the run.

        Raises:
            ChildError: a process ended too early, failed, or did not end in time.
        """
        self._prepare()
        self._train_baseline()
        self._start_learners()
        self._wait_until(self.plan.learner_killed_at_step, _POLL_BEFORE_KILL_S)
        self._kill_learner()
        self._wait_until(self.plan.learner_back_at_step, _POLL_S)
        self._restart_learner()
        self._wait_until(self.plan.syncer_killed_at_step, _POLL_S)
        self._kill("syncer")
        self._note("syncer_killed", "SIGKILL for the syncer; the learners train on")
        self._wait_until(self.plan.syncer_back_at_step, _POLL_S)
        self._start_syncer()
        self._note("syncer_back", "a new syncer serves from the store")
        self._wait_until(self.plan.step_count, _POLL_BEFORE_KILL_S)
        self._close()
        self._end()

    @property
    def checkpoint_of_baseline(self) -> Path:
        """Where the baseline left its weights."""
        return self._work_directory(self.plan.baseline) / "checkpoint.pt"

    def _prepare(self) -> None:
        # Removes only what earlier demos made: the directory may hold other files.
        for name in ("store", "learners", "logs", "exports"):
            shutil.rmtree(self.plan.directory / name, ignore_errors=True)
        self.plan.directory.mkdir(parents=True, exist_ok=True)
        training = self.plan.training
        policy = {"inner_step_count": training.inner_step_count, "lease_term_s": training.lease_term_s}
        self._policy_path.write_text(json.dumps(policy))

    def _train_baseline(self) -> None:
        self.phase = "training a single learner as a baseline"
        arguments = self._learn_arguments(self.plan.baseline, step_count=self.plan.step_count)
        child = self._nursery.start("single", [*arguments, "--alone"])
        while child.is_running:
            self._look(_POLL_S)
        child.expect_success(_END_TIMEOUT_S)
        self._look(0)

    def _start_learners(self) -> None:
        self.phase = "training on three learners"
        self._start_syncer()
        for learner in self.plan.learners:
            self._start_learner(learner)
        while not all(follower.lines for follower in self.learners.values()):
            self._look(_POLL_S)
            self._check_all_alive()
        # The first step counts as the start; the time before it is the start of Python.
        first_step_s = min(follower.lines[0].unix_s for follower in self.learners.values())
        self._note("started", "three learners train", first_step_s)

    def _kill_learner(self) -> None:
        """Kill it just after one of its steps, when few acknowledged deltas are missing from its metrics file."""
        name = self.plan.killed_learner_id
        while not self.learners[name].poll():
            self._check_all_alive()
            time.sleep(_POLL_BEFORE_KILL_S)
        self._kill(name)
        self._note("learner_killed", f"SIGKILL for {name} at its step {self.learners[name].step}")

    def _restart_learner(self) -> None:
        name = self.plan.killed_learner_id
        follower = self.learners[name]
        killed_attempt = follower.lines[-1].attempt
        self._start_learner(next(learner for learner in self.plan.learners if learner.learner_id == name))
        while follower.lines[-1].attempt == killed_attempt:
            self._look(_POLL_S)
            self._check_all_alive()
        # It is back when it has taken a step, not when its process starts.
        first_line = next(line for line in follower.lines if line.attempt != killed_attempt)
        text = f"{name} is back, from its checkpoint at step {first_line.step - 1}"
        self._note("learner_back", text, first_line.unix_s)

    def _close(self) -> None:
        """Close the run while all learners train. Deltas that arrive later are refused, so they are not counted."""
        self.phase = "closing the run"
        self._note("ended", f"{self.plan.timekeeper.learner_id} has taken its steps: the run is closed")
        with RunsClient(self._target) as runs:
            runs.close_run(self.plan.run)
        self._note("closed", "every delta has its fate")

    def _end(self) -> None:
        """Wait for the learners, which stop when they hear that the run is closed, and stop the syncer."""
        self.phase = "stopping the learners"
        for learner in self.plan.learners:
            self._wait_for_end(self._children[learner.learner_id])
        syncer = self._children["syncer"]
        syncer.ask_to_stop()
        self._wait_for_end(syncer)

    def _wait_until(self, step: int, poll_s: float) -> None:
        """Wait until the timekeeper has taken `step` steps, and return within `poll_s` of that step's end."""
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
        self._show(self)
        time.sleep(wait_s)

    def _check_all_alive(self) -> None:
        for name, child in self._children.items():
            if name not in self.killed and not child.is_running:
                raise ChildError(f"{name} ended too early. log={child.log_path}\n{child.log_tail()}")

    def _kill(self, name: str) -> None:
        self._children[name].kill()
        self.killed.add(name)

    def _start_syncer(self) -> None:
        port_path = self.plan.directory / "store-port"
        port_path.unlink(missing_ok=True)
        arguments = ["serve", "--new-store", "--listen", f"127.0.0.1:{self._port}", "--store", self.plan.store_url]
        child = self._nursery.start("syncer", [*arguments, "--port-file", str(port_path)])
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not (port_path.exists() and port_path.read_text().strip() and self._is_listening(port_path)):
            if not child.is_running or time.monotonic() > deadline:
                raise ChildError(f"the syncer did not start. log={child.log_path}\n{child.log_tail()}")
            self._look(_POLL_S)
        self._port = int(port_path.read_text())
        self._children["syncer"] = child
        self.killed.discard("syncer")

    @staticmethod
    def _is_listening(port_path: Path) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", int(port_path.read_text()))) == 0

    def _start_learner(self, learner: LearnerPlan) -> None:
        # It trains until it hears that the run is closed.
        arguments = [
            *self._learn_arguments(learner, step_count=_UNLIMITED_STEPS),
            *("--target", self._target, self.plan.run, "--region", learner.region),
            *("--slowdown", str(learner.slowdown), "--policy", str(self._policy_path)),
        ]
        self._children[learner.learner_id] = self._nursery.start(learner.learner_id, arguments)
        self.killed.discard(learner.learner_id)

    def _learn_arguments(self, learner: LearnerPlan, *, step_count: int) -> list[str]:
        training = self.plan.training
        return [
            *("learn", "--learner-id", learner.learner_id, "--model", training.model, "--shard", learner.shard),
            *("--steps", str(step_count), "--horizon", str(self.plan.step_count)),
            *("--learning-rate", str(training.learning_rate), "--warmup", str(training.warmup_steps)),
            *("--batch", str(training.batch_size), "--checkpoint-every", "50"),
            *("--eval-every", str(max(1, round(training.evaluate_every / learner.slowdown)))),
            *("--eval-windows", str(training.evaluation_window_count)),
            *("--seed", str(training.seed), "--device", "cpu", "--threads", "1"),
            *("--work-dir", str(self._work_directory(learner))),
        ]

    @property
    def _target(self) -> str:
        return f"127.0.0.1:{self._port}"

    @property
    def _policy_path(self) -> Path:
        return self.plan.directory / "policy.json"

    def _work_directory(self, learner: LearnerPlan) -> Path:
        return self.plan.directory / "learners" / learner.learner_id

    def _note(self, moment: Moment, text: str, unix_s: float | None = None) -> None:
        self.timeline.events[moment] = DemoEvent(time.time() if unix_s is None else unix_s, text)
