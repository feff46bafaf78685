"""Learners that are given a store in place of a syncer's address: each process serves it to itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pytest

from skerry import ArrayLearner, RunsClient, Tls
from skerry.errors import RefusedError, TryAgainError
from skerry.net import own_syncer
from skerry_syncer.store.objects.opening import open_objects
from tests.support.ports import free_ports
from tests.support.quadratic import QUICK, Quadratic, train_until

# Each step adds 1 to an array, and plain averaging of float32 brings all of it into the run. A line follows each step.
_LEARNER = """
import os, signal, sys, time
import numpy as np
from skerry import ArrayLearner, MergeRule, OuterOptimizer, OuterSchedule, Policy
from skerry.wire import Codec, Encoding

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has its background jobs ignore it
outer = OuterOptimizer(learning_rate=1.0, momentum=0.0, schedule=OuterSchedule.CONSTANT)
exact = Encoding(codec=Codec.FLOAT32)
policy = Policy(
    inner_step_count=5, lease_term_s=1.0, outer=outer, merge=MergeRule.MEAN, delta_encoding=exact, update_encoding=exact
)
array = np.zeros(4, np.float32)
options = {"target": sys.argv[1], "run": "fit", "learner_id": sys.argv[2], "create": True, "policy": policy}
step_count = 0
with ArrayLearner({"w": array}, **options) as learner:
    if "forks" in sys.argv and not os.fork():  # as a worker of a DataLoader that does not hear of its parent's end
        time.sleep(60)
        os._exit(0)
    try:
        while True:
            array += 1
            step_count += 1
            learner.step(tokens=1)
            print(step_count, sum(learner.stats.versions.values()), learner.stats.deltas_acknowledged, flush=True)
            time.sleep(0.01)
    finally:
        learner.leave(20)
        print(learner.stats.unsent_step_count, "left", flush=True)
"""


class Started:
    """A learner in a process group of its own, as a shell starts it."""

    def __init__(self, store: str, learner_id: str, folder: Path, *words: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _LEARNER, store, learner_id, *words],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "TMPDIR": str(folder), "SKERRY_LISTEN": "nowhere", "OMP_NUM_THREADS": "1"},
        )
        assert self.process.stdout is not None
        self.lines = self.process.stdout

    def read(self, *, version: int = 0, acknowledged: int = 0) -> int:
        """Reads until that version is adopted and so many deltas are acknowledged; returns the version."""
        for line in self.lines:
            now = list(map(int, line.split()))
            if now[1] >= version and now[2] >= acknowledged:
                return now[1]
        pytest.fail("the learner has ended")

    def syncers(self) -> list[psutil.Process]:
        """Returns the processes that it has started and that are syncers."""
        children = psutil.Process(self.process.pid).children()
        return [child for child in children if "skerry.cli" in child.cmdline()]


@pytest.fixture
def learners(tmp_path: Path) -> Iterator[Callable[..., Started]]:
    """Starts learners, in a temporary folder of theirs; what is left of them is killed."""
    started: list[Started] = []
    (tmp_path / "tmp").mkdir()

    def start(learner_id: str, *words: str) -> Started:
        started.append(Started(f"file://{tmp_path}/store", learner_id, tmp_path / "tmp", *words))
        return started[-1]

    yield start
    for one in started:
        with suppress(ProcessLookupError):
            os.killpg(one.process.pid, signal.SIGKILL)
        one.process.wait()
        one.lines.close()


def assert_gone(processes: list[psutil.Process]) -> None:
    deadline_s = time.monotonic() + 10
    while any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes):
        assert time.monotonic() < deadline_s, processes
        time.sleep(0.05)


def test_a_client_of_a_store_has_a_syncer_for_itself_until_it_closes(tmp_path: Path) -> None:
    target = f"file://{tmp_path}/store"
    open_objects(target)
    with RunsClient(target) as client, RunsClient(target) as other:
        (own,) = own_syncer._SYNCERS.values()
        assert own._folder.stat().st_mode & 0o777 == 0o700
        own._child.send_signal(signal.SIGTERM)  # as where a whole job is told to end
        assert list(client.list_runs()) == list(other.list_runs()) == []
    assert own._child.returncode == 0
    assert not own._folder.exists()
    assert own_syncer._SYNCERS == {}


@pytest.mark.long
def test_two_learners_and_a_folder_train_one_model_and_one_that_is_killed_leaves_nothing(
    learners: Callable[..., Started], tmp_path: Path
) -> None:
    us, eu = learners("us"), learners("eu", "forks")
    for learner in (us, eu):
        learner.read(version=3, acknowledged=3)
    left_of_us, left_of_eu = us.syncers(), eu.syncers()
    assert (len(left_of_us), len(left_of_eu)) == (1, 1)
    eu.process.kill()
    assert_gone(left_of_eu)
    us.read(version=us.read() + 3)
    us.process.send_signal(signal.SIGINT)
    assert us.lines.read().endswith("0 left\n")
    assert_gone(left_of_us)
    assert list((tmp_path / "tmp").glob("skerry-*")) == []


@pytest.mark.long
def test_ctrl_c_reaches_a_learner_and_its_syncer_outlives_it_until_the_last_step_is_merged(
    learners: Callable[..., Started], tmp_path: Path
) -> None:
    learner = learners("us")
    learner.read(version=1)
    (syncer,) = learner.syncers()
    syncer.send_signal(signal.SIGTERM)  # as where a whole job is told to end
    os.killpg(learner.process.pid, signal.SIGINT)
    *steps, end = learner.lines.read().splitlines()
    assert end == "0 left"
    assert_gone([syncer])
    array = np.zeros(4, np.float32)
    with ArrayLearner({"w": array}, target=f"file://{tmp_path}/store", run="fit", learner_id="observer"):
        (merged,) = set(array.tolist())
    taken = int(steps[-1].split()[0]) if steps else 0
    assert merged >= max(taken, 5)


@pytest.mark.long
def test_a_syncer_that_is_killed_is_started_again(tmp_path: Path) -> None:
    target, problem = f"file://{tmp_path}/store", Quadratic()
    with ArrayLearner(problem.arrays, target=target, run="fit", learner_id="us", create=True, policy=QUICK) as learner:
        own = own_syncer._SYNCERS[target]
        first = own._child
        first.kill()
        first.wait()
        version = sum(learner.stats.versions.values())
        train_until([(problem, learner)], lambda: sum(learner.stats.versions.values()) > version + 2)
        assert own._child is not first


def test_an_error_says_what_a_store_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RefusedError, match="the folder does not exist") as refused:
        RunsClient(f"file://{tmp_path}/store")
    assert refused.value.reason == "STORE_REFUSED"
    with pytest.raises(ValueError, match="leave tls out"):
        RunsClient("s3://bucket/run", tls=Tls(ca="ca.pem"))
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    with pytest.raises(RefusedError, match=r"set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"):
        RunsClient("s3://bucket/run")
    assert own_syncer._SYNCERS == {}


@pytest.mark.long
def test_a_store_that_does_not_answer_is_named_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_ports(1)[0]}")
    with pytest.raises(TryAgainError, match="the store does not answer") as away:
        RunsClient("s3://bucket/run", timeout_s=30.0)
    assert away.value.reason == "STORE_UNAVAILABLE"
    assert own_syncer._SYNCERS == {}
