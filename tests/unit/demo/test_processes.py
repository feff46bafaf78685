"""Child processes: started, killed, asked to stop, and never left behind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from skerry_demo.follow import MetricsFollower
from skerry_demo.processes import Child, ChildError, Nursery

_ENDLESS = [
    *("learn", "--alone", "--model", "nano", "--batch", "2", "--data-limit-mb", "0.3", "--eval-windows", "4"),
    *("--steps", "1000000", "--checkpoint-every", "0"),
]


def _started(nursery: Nursery, directory: Path) -> tuple[Child, MetricsFollower]:
    """An endless learner that has taken its first step."""
    child = nursery.start("endless", [*_ENDLESS, "--work-dir", str(directory / "work")])
    follower = MetricsFollower(directory / "work" / "metrics.jsonl")
    while not follower.poll():
        assert child.is_running, child.log_tail()
    return child, follower


@pytest.fixture
def nursery(tmp_path: Path) -> Nursery:
    return Nursery(tmp_path, {**os.environ, "OMP_NUM_THREADS": "1"})


def test_a_killed_child_leaves_its_metrics_and_no_checkpoint(nursery: Nursery, tmp_path: Path) -> None:
    child, follower = _started(nursery, tmp_path)
    child.kill()
    follower.poll()
    assert not child.is_running
    assert follower.step >= 1
    assert not (tmp_path / "work" / "checkpoint.pt").exists()
    with pytest.raises(ChildError, match="endless ended with status -9"):
        child.expect_success(1)


def test_a_child_that_is_asked_to_stop_succeeds_and_leaves_a_checkpoint(nursery: Nursery, tmp_path: Path) -> None:
    child, _ = _started(nursery, tmp_path)
    child.ask_to_stop()
    child.expect_success(60)
    assert (tmp_path / "work" / "checkpoint.pt").exists()


def test_nothing_outlives_the_nursery(nursery: Nursery, tmp_path: Path) -> None:
    with nursery:
        child, _ = _started(nursery, tmp_path)
    assert not child.is_running


def test_a_failure_comes_with_the_end_of_its_log(nursery: Nursery) -> None:
    child = nursery.start("wrong", ["learn", "--alone", "--shard", "9/3"])
    with pytest.raises(ChildError, match=r"(?s)wrong ended with status 2.*a shard is i/n"):
        child.expect_success(60)


def test_output_is_what_the_command_wrote(nursery: Nursery) -> None:
    assert "skerry learn" in nursery.output("help", ["learn", "--help"])
    with pytest.raises(ChildError, match=r"(?s)wrong ended with status 2.*No such option"):
        nursery.output("wrong", ["learn", "--nonsense"])


def test_a_follower_reads_whole_lines_as_they_come(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    follower = MetricsFollower(path)
    assert not follower.poll()
    line = (
        b'{"learner":"a","attempt":0,"time_s":1,"unix_s":1,"step":3,"tokens":1,"loss":1,'
        b'"learning_rate":1,"step_time_ms":1}\n'
    )
    path.write_bytes(line + line[:20])
    assert follower.poll()
    assert not follower.poll()
    path.write_bytes(line + line)
    assert follower.poll()
    assert [line.step for line in follower.lines] == [3, 3]
