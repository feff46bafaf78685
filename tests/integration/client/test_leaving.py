"""A process that is told to end, by a signal as before a machine goes away, loses no step."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from skerry import ArrayLearner, Policy, RunsClient, Stats, leave_on_signal
from skerry.runtime.clock import SystemClock
from skerry.runtime.identifiers import SystemEntropy
from skerry.runtime.workers import InlineWorkers
from skerry.v1.types_pb2 import FATE_QUARANTINED, FateCount, LearnerStatus
from skerry_syncer.store.log import entries
from skerry_syncer.store.objects.opening import open_objects
from skerry_syncer.store.store import Store
from tests.support.heard_logs import heard_logs
from tests.support.quadratic import QUICK, Quadratic
from tests.support.syncer_thread import syncer

# Each step adds 1 to an array, and plain averaging of float32 brings all of it into the run.
TRAINER = """
import itertools, sys, threading
import numpy as np
from skerry import ArrayLearner, MergeRule, OuterOptimizer, OuterSchedule, Policy, leave_on_signal
from skerry.wire import Codec, Encoding

array = np.zeros(4, np.float32)
outer = OuterOptimizer(learning_rate=1.0, momentum=0.0, schedule=OuterSchedule.CONSTANT)
exact = Encoding(codec=Codec.FLOAT32)
policy = Policy(inner_step_count=1000, outer=outer, merge=MergeRule.MEAN, delta_encoding=exact, update_encoding=exact)
run = {"target": sys.argv[1], "run": "fit", "create": True, "policy": policy}
with ArrayLearner({"w": array}, learner_id="spot", **run) as learner:
    leave_on_signal(learner)
    for step in itertools.count(1):
        array += 1
        print("step", step, flush=True)
        threading.Event().wait(0.01)
        learner.step(tokens=1)
"""


def test_a_process_that_is_terminated_in_a_step_finishes_it_and_loses_none(tmp_path: Path) -> None:
    with syncer() as target:
        process = subprocess.Popen([sys.executable, "-c", TRAINER, target], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        while process.stdout.readline() != "step 20\n":
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        rest, _ = process.communicate(timeout=60)
        step_count = 20 + sum(line.startswith("step ") for line in rest.splitlines())
        assert process.returncode == 128 + signal.SIGTERM
        array = np.zeros(4, np.float32)
        with ArrayLearner({"w": array}, target=target, run="fit", learner_id="observer"):
            assert array.tolist() == [step_count] * 4


def test_a_second_signal_does_what_it_did_before(target: str) -> None:
    heard: list[int] = []
    previous = signal.signal(signal.SIGUSR1, lambda number, _: heard.append(number))
    try:
        learner = ArrayLearner(Quadratic().arrays, target=target, run="fit", learner_id="us", create=True)
        leave_on_signal(learner, signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR1)
        assert heard == []
        signal.raise_signal(signal.SIGUSR1)
        assert heard == [signal.SIGUSR1]
        with pytest.raises(SystemExit) as left, learner:
            learner.step(tokens=1)
        assert left.value.code == 128 + signal.SIGUSR1
        assert learner.stats.unsent_step_count == 0
    finally:
        signal.signal(signal.SIGUSR1, previous)


def _learner(target: str, learner_id: str) -> ArrayLearner:
    return ArrayLearner(Quadratic().arrays, target=target, run="fit", learner_id=learner_id, create=True)


def test_of_two_learners_the_signal_is_that_of_the_one_that_is_there(target: str) -> None:
    def before(number: int, _: object) -> None:
        raise AssertionError(number)

    previous = signal.signal(signal.SIGUSR1, before)
    try:
        first, second = _learner(target, "us"), _learner(target, "eu")
        leave_on_signal(first, signal.SIGUSR1)
        leave_on_signal(second, signal.SIGUSR1)
        later = signal.getsignal(signal.SIGUSR1)
        assert later is not before
        first.close()
        assert signal.getsignal(signal.SIGUSR1) is later
        second.close()
        with pytest.raises(AssertionError):  # the second one gave the handler of the first one back
            signal.raise_signal(signal.SIGUSR1)
        assert signal.getsignal(signal.SIGUSR1) is before
    finally:
        signal.signal(signal.SIGUSR1, previous)


# With a quorum that nobody fills, every delta stays pending until another replica decides.
LONELY = Policy(inner_step_count=4, lease_term_s=1.0, quorum_count=2)


async def _decide(store_url: str, uid: str, fate: entries.Fate, reason: str) -> int:
    """Gives all pending deltas of the run "fit" a fate, as another replica does, and returns how many there were."""
    objects = open_objects(store_url)
    store = Store(objects, clock=SystemClock(), entropy=SystemEntropy(), workers=InlineWorkers(), writer="other")
    log = (await store.open_run("fit", uid)).log
    pending = [name for fragment in log.state.fragments.values() for name in fragment.pending]
    await log.append([entries.FateItem(tuple(entries.Decided(name, fate, reason) for name in pending))])
    await store.close()
    return len(pending)


class _Undecided:
    """A learner that has trained H steps, and whose deltas are pending."""

    def __init__(self, folder: Path, target: str, learner_id: str = "us") -> None:
        self.store_url = f"file://{folder}/store"
        self.target = target
        self.problem = Quadratic()
        self.learner = ArrayLearner(
            self.problem.arrays, target=target, run="fit", learner_id=learner_id, create=True, policy=LONELY
        )
        for _ in range(4):
            self.learner.step(tokens=8, loss=self.problem.descend())
        assert self.learner.flush(10.0)

    def train(self) -> None:
        """Trains until every fragment has another delta pending."""
        wanted = self.learner.stats.deltas_acknowledged + len(self.learner.stats.versions)
        while self.learner.stats.deltas_acknowledged < wanted:
            self.learner.step(tokens=8, loss=self.problem.descend())

    def decide(self, fate: entries.Fate, reason: str) -> None:
        """Gives the pending deltas a fate, and returns when the learner has heard of it."""
        with RunsClient(self.target) as client:
            uid = client.get_run("fit").run.uid
        count = asyncio.run(_decide(self.store_url, uid, fate, reason))
        assert count == len(self.learner.stats.versions)
        before = sum(self.learner.stats.causes.values())
        self.wait(lambda stats: sum(stats.causes.values()) == before + count)

    def wait(self, holds: Callable[[Stats], bool]) -> None:
        """Returns when the stats are so; what waits for a step boundary is done meanwhile."""
        deadline_s = time.monotonic() + 30
        while not holds(self.learner.stats):
            assert time.monotonic() < deadline_s, self.learner.stats
            threading.Event().wait(0.1)  # each flush sends a report
            self.learner.flush(0.1)

    def status(self) -> LearnerStatus:
        """The learner as observers see it."""
        with RunsClient(self.target) as client:
            return next(one for one in client.get_run("fit").learners if one.learner_id == "us")


@pytest.fixture
def undecided(tmp_path: Path) -> Iterator[_Undecided]:
    with syncer(store_url=f"file://{tmp_path}/store") as target:
        world = _Undecided(tmp_path, target)
        yield world
        world.learner.close()


def test_what_is_quarantined_is_counted_told_once_and_seen_by_observers(undecided: _Undecided) -> None:
    learner, fragments = undecided.learner, len(undecided.learner.stats.versions)
    with heard_logs() as logs:
        for ratio in (168.4, 170.1):
            undecided.decide(entries.Fate.QUARANTINED, f"norm is an outlier. ratio={ratio}")
            undecided.train()
        stats = learner.stats
        undecided.learner.close()
    assert stats.causes == {"quarantined: norm is an outlier": 2 * fragments}
    assert stats.deltas_dropped == 2 * fragments
    assert stats.dropped_step_count >= 8
    assert stats.problem is not None
    assert stats.problem.reason == "QUARANTINED", "deltas that were acknowledged since hide it"

    told = [line for line in logs if line.get("cause") == "quarantined: norm is an outlier"]
    assert len(told) == 2, "one when it happens, and one with the count"
    assert "ratio=168.4" in told[0]["because"]
    assert (told[1]["log_level"], told[1]["deltas"]) == ("warning", 2 * fragments)

    status = undecided.status()
    refused = FateCount(fate=FATE_QUARANTINED, reason="norm is an outlier", delta_count=2 * fragments)
    assert refused in status.fates
    assert (status.report.problem, status.report.dropped_step_count) == ("QUARANTINED", stats.dropped_step_count)


def test_a_learner_that_leaves_says_what_became_of_its_last_work(target: str) -> None:
    problem = Quadratic()
    learner = ArrayLearner(problem.arrays, target=target, run="fit", learner_id="us", create=True, policy=QUICK)
    for _ in range(3):
        learner.step(tokens=8, loss=problem.descend())
    work = learner.leave()
    assert work
    assert (work.merged_step_count, work.pending_step_count, work.unsent_step_count) == (3, 0, 0)
    assert learner.leave() == work
    with RunsClient(target) as client:
        (status,) = client.get_run("fit").learners
    assert (status.is_live, status.has_left, status.report.step_count) == (False, True, 3)


def test_work_that_the_run_has_not_decided_is_pending_and_counts_as_there(undecided: _Undecided) -> None:
    work = undecided.learner.leave(0.2)
    assert work
    assert (work.merged_step_count, work.pending_step_count) == (0, 4)


def test_leaving_a_syncer_that_is_away_says_how_many_steps_are_unsent() -> None:
    problem = Quadratic()
    with syncer() as target:
        learner = ArrayLearner(problem.arrays, target=target, run="fit", learner_id="us", create=True, policy=QUICK)
    for _ in range(3):
        learner.step(tokens=8, loss=problem.descend())
    work = learner.leave(0.2)
    assert not work
    assert work.unsent_step_count == 3
    assert work.because


@pytest.mark.parametrize("flushes_last", [False, True])
def test_what_was_flushed_is_merged_though_the_learner_closes_at_once(target: str, *, flushes_last: bool) -> None:
    problem = Quadratic()
    learner = ArrayLearner(problem.arrays, target=target, run="fit", learner_id="us", create=True, policy=QUICK)
    learner.step(tokens=8, loss=problem.descend())
    assert learner.flush(10.0, is_last=flushes_last)
    learner.close()
    deadline_s = time.monotonic() + 20
    with RunsClient(target) as client:
        while not all(version.version for version in client.get_run("fit").run.versions):
            assert time.monotonic() < deadline_s, "a delta of fewer than H steps waits for the run's end"
