"""A process that is told to end, by a signal as before a machine goes away, loses no step."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest

from skerry import ArrayLearner, Policy, RunsClient, leave_on_signal
from tests.support.quadratic import QUICK, Quadratic

# With a quorum that nobody fills, every delta stays pending until another replica decides.
LONELY = Policy(inner_step_count=4, lease_term_s=1.0, quorum_count=2)


def trained(target: str, learner_id: str = "us", *, step_count: int = 3, policy: Policy = QUICK) -> ArrayLearner:
    """Returns a learner that has taken some steps."""
    problem = Quadratic()
    learner = ArrayLearner(problem.arrays, target=target, run="fit", learner_id=learner_id, create=True, policy=policy)
    for _ in range(step_count):
        learner.step(tokens=8, loss=problem.descend())
    return learner


@pytest.fixture
def heard() -> Iterator[list[int]]:
    """The signals that the handler of before has heard."""
    numbers: list[int] = []
    previous = signal.signal(signal.SIGUSR1, lambda number, _: numbers.append(number))
    yield numbers
    signal.signal(signal.SIGUSR1, previous)


def test_the_signal_that_a_launcher_passes_on_is_the_same_notice(target: str, heard: list[int]) -> None:
    learner = trained(target)
    leave_on_signal(learner, signal.SIGUSR1)
    signal.raise_signal(signal.SIGUSR1)
    signal.raise_signal(signal.SIGUSR1)
    with pytest.raises(SystemExit) as left, learner:
        learner.step(tokens=1)
    signal.raise_signal(signal.SIGUSR1)  # while the program ends
    assert heard == []
    assert left.value.code == 128 + signal.SIGUSR1
    assert learner.stats.unsent_step_count == 0


def test_a_program_that_goes_on_after_the_notice_is_ended_by_the_next_signal(target: str, heard: list[int]) -> None:
    with trained(target) as learner:
        leave_on_signal(learner, signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR1)  # after the last step
    assert learner.stats.unsent_step_count == 0
    signal.raise_signal(signal.SIGUSR1)
    assert heard == [signal.SIGUSR1]


def test_a_loop_that_fails_once_it_was_told_to_leave_exits_as_it_was_told(target: str) -> None:
    learner = trained(target)
    learner.leave_soon(143)
    with pytest.raises(SystemExit) as left, learner:
        raise RuntimeError("DataLoader worker exited unexpectedly")
    assert (left.value.code, learner.stats.unsent_step_count) == (143, 0)
    assert isinstance(left.value.__cause__, RuntimeError)


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


@pytest.mark.parametrize("flushes_last", [False, True])
def test_what_was_flushed_is_merged_though_the_learner_closes_at_once(target: str, *, flushes_last: bool) -> None:
    learner = trained(target, step_count=1)
    assert learner.flush(10.0, is_last=flushes_last)
    learner.close()
    deadline_s = time.monotonic() + 20
    with RunsClient(target) as client:
        while not all(version.version for version in client.get_run("fit").run.versions):
            assert time.monotonic() < deadline_s, "a delta of fewer than H steps waits for the run's end"
