"""A process that is told to end, by a signal as before a machine goes away, loses no step."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from skerry.client import ArrayLearner, leave_on_signal
from tests.client.quadratic import Quadratic
from tests.client.syncer_thread import syncer

# Each step adds 1 to an array, and plain averaging of float32 brings all of it into the run.
TRAINER = """
import itertools, sys, threading
import numpy as np
from skerry.client import ArrayLearner, MergeRule, OuterOptimizer, OuterSchedule, Policy, leave_on_signal
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


@pytest.fixture
def handler() -> Iterator[Callable[[int, object], None]]:
    """What a program handled SIGUSR1 with before."""

    def before(number: int, _: object) -> None:
        heard.append(number)

    heard: list[int] = []
    previous = signal.signal(signal.SIGUSR1, before)
    yield before
    signal.signal(signal.SIGUSR1, previous)


def test_a_learner_that_has_left_leaves_no_handler(target: str, handler: Callable[[int, object], None]) -> None:
    with _learner(target, "us") as learner:
        leave_on_signal(learner, signal.SIGUSR1)
        assert signal.getsignal(signal.SIGUSR1) is not handler
        learner.step(tokens=1)
    assert signal.getsignal(signal.SIGUSR1) is handler


def test_of_two_learners_the_signal_is_that_of_the_one_that_is_there(
    target: str, handler: Callable[[int, object], None]
) -> None:
    first, second = _learner(target, "us"), _learner(target, "eu")
    leave_on_signal(first, signal.SIGUSR1)
    leave_on_signal(second, signal.SIGUSR1)
    later = signal.getsignal(signal.SIGUSR1)
    first.close()
    assert signal.getsignal(signal.SIGUSR1) is later
    second.close()
    signal.raise_signal(signal.SIGUSR1)  # the second one gave the handler of the first one back
    assert signal.getsignal(signal.SIGUSR1) is handler
