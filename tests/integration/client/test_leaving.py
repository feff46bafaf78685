"""A process that is told to end, by a signal as before a machine goes away, loses no step."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from skerry import ArrayLearner, Policy, RunsClient, leave_on_signal
from skerry.runtime.clock import SystemClock
from skerry.runtime.identifiers import SystemEntropy
from skerry.runtime.workers import InlineWorkers
from skerry.v1.types_pb2 import FATE_QUARANTINED, FateCount
from skerry_syncer.store.log import entries
from skerry_syncer.store.objects.opening import open_objects
from skerry_syncer.store.store import Store
from tests.support.quadratic import QUICK, Quadratic
from tests.support.syncer_thread import syncer

# With a quorum that nobody fills, every delta stays pending until another replica decides.
LONELY = Policy(inner_step_count=4, lease_term_s=1.0, quorum_count=2)


def trained(target: str, learner_id: str = "us", *, step_count: int = 3, policy: Policy = QUICK) -> ArrayLearner:
    """Returns a learner that has taken some steps."""
    problem = Quadratic()
    learner = ArrayLearner(problem.arrays, target=target, run="fit", learner_id=learner_id, create=True, policy=policy)
    for _ in range(step_count):
        learner.step(tokens=8, loss=problem.descend())
    return learner


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


@pytest.fixture
def heard() -> Iterator[list[int]]:
    """The signals that the handler of before has heard."""
    numbers: list[int] = []
    previous = signal.signal(signal.SIGUSR1, lambda number, _: numbers.append(number))
    yield numbers
    signal.signal(signal.SIGUSR1, previous)


def test_a_second_signal_does_what_it_did_before(target: str, heard: list[int]) -> None:
    learner = trained(target, step_count=0)
    leave_on_signal(learner, signal.SIGUSR1)
    signal.raise_signal(signal.SIGUSR1)
    assert heard == []
    signal.raise_signal(signal.SIGUSR1)
    assert heard == [signal.SIGUSR1]
    with pytest.raises(SystemExit) as left, learner:
        learner.step(tokens=1)
    assert left.value.code == 128 + signal.SIGUSR1
    assert learner.stats.unsent_step_count == 0


def test_of_two_learners_the_signal_is_that_of_the_one_that_is_there(target: str, heard: list[int]) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    learners = [trained(target, learner_id, step_count=0) for learner_id in ("us", "eu")]
    for learner in learners:
        leave_on_signal(learner, signal.SIGUSR1)
    learners[0].close()
    assert signal.getsignal(signal.SIGUSR1) is not before
    learners[1].close()
    signal.raise_signal(signal.SIGUSR1)
    assert heard == [signal.SIGUSR1], "the second one gave the handler of the first one back"
    assert signal.getsignal(signal.SIGUSR1) is before


def test_what_is_quarantined_is_counted_and_seen_by_observers(tmp_path: Path) -> None:
    store_url = f"file://{tmp_path}/store"
    with syncer(store_url=store_url) as target, RunsClient(target) as client:
        learner = trained(target, step_count=4, policy=LONELY)
        assert learner.flush(10.0)
        count = asyncio.run(_quarantine(store_url, client.get_run("fit").run.uid))
        assert count == len(learner.stats.versions)
        deadline_s = time.monotonic() + 30
        while sum(learner.stats.causes.values()) < count:
            assert time.monotonic() < deadline_s, learner.stats
            learner.flush(0.1)
        learner.close()
        (status,) = client.get_run("fit").learners
    stats = learner.stats
    assert (stats.causes, stats.deltas_dropped) == ({"quarantined: norm is an outlier": count}, count)
    assert FateCount(fate=FATE_QUARANTINED, reason="norm is an outlier", delta_count=count) in status.fates
    assert (status.report.problem, status.report.dropped_step_count) == ("QUARANTINED", stats.dropped_step_count)


async def _quarantine(store_url: str, uid: str) -> int:
    """Quarantines all pending deltas of the run, as another replica does, and returns how many there were."""
    objects = open_objects(store_url)
    store = Store(objects, clock=SystemClock(), entropy=SystemEntropy(), workers=InlineWorkers(), writer="other")
    log = (await store.open_run("fit", uid)).log
    pending = [name for fragment in log.state.fragments.values() for name in fragment.pending]
    reason = "norm is an outlier. ratio=168.4"
    decided = tuple(entries.Decided(name, entries.Fate.QUARANTINED, reason) for name in pending)
    await log.append([entries.FateItem(decided)])
    await store.close()
    return len(pending)


def test_a_learner_that_leaves_says_what_became_of_its_last_work(target: str) -> None:
    learner = trained(target)
    work = learner.leave()
    assert work
    assert (work.merged_step_count, work.pending_step_count, work.unsent_step_count) == (3, 0, 0)
    assert learner.leave() == work
    with RunsClient(target) as client:
        (status,) = client.get_run("fit").learners
    assert (status.is_live, status.has_left, status.report.step_count) == (False, True, 3)


def test_work_that_the_run_has_not_decided_is_pending_and_counts_as_there(target: str) -> None:
    learner = trained(target, step_count=4, policy=LONELY)
    assert learner.flush(10.0)
    work = learner.leave(0.2)
    assert work
    assert (work.merged_step_count, work.pending_step_count) == (0, 4)


def test_leaving_a_syncer_that_is_away_says_how_many_steps_are_unsent() -> None:
    with syncer() as target:
        learner = trained(target, step_count=0)
    for _ in range(3):
        learner.step(tokens=8)
    work = learner.leave(0.2)
    assert not work
    assert work.unsent_step_count == 3
    assert work.because


@pytest.mark.parametrize("flushes_last", [False, True])
def test_what_was_flushed_is_merged_though_the_learner_closes_at_once(target: str, *, flushes_last: bool) -> None:
    learner = trained(target, step_count=1)
    assert learner.flush(10.0, is_last=flushes_last)
    learner.close()
    deadline_s = time.monotonic() + 20
    with RunsClient(target) as client:
        while not all(version.version for version in client.get_run("fit").run.versions):
            assert time.monotonic() < deadline_s, "a delta of fewer than H steps waits for the run's end"
