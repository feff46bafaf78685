"""deploy/slurm/learner.sbatch on Slurm: a learner trains, is killed, is requeued, and comes back as the same one."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Self

import psutil
import pytest

from skerry import RunsClient
from tests.e2e import slurm
from tests.e2e.machine import ROOT, need_programs, need_root, run, tail, wait_until
from tests.e2e.slurm import Slurm
from tests.support.syncer_thread import syncer

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

_SCRIPT: Final = ROOT / "deploy/slurm/learner.sbatch"
# One rank, which leaves on SIGTERM.
_PROGRAM: Final = ROOT / "examples/preemption.py"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Slurm]:
    """A cluster of one node."""
    need_root()
    need_programs(slurm.PACKAGES)
    cluster = Slurm()
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


class Job:
    """A learner as a job, which is cancelled in the end: the cluster has one node, and the next job needs it."""

    def __init__(self, cluster: Slurm, target: str, folder: Path) -> None:
        self.cluster = cluster
        self.output = folder / "job.log"
        self._client = RunsClient(target)
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        env = {"SKERRY_TARGET": target, "SKERRY_LEARNER_ID": "us", "PATH": path, "OMP_NUM_THREADS": "1"}
        words: list[str | Path] = [f"--output={self.output}", _SCRIPT, _PROGRAM, "us"]
        self.number = cluster.submit(*words, env=env)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        run(["scancel", self.number], timeout_s=30, env=self.cluster.env)
        wait_until(
            lambda: self.cluster.job(self.number)["JobState"] == "CANCELLED", what="it is cancelled", timeout_s=60
        )

    def version_count(self) -> int:
        """Returns how many versions the run has, whose only learner this is; 0 if there is no run."""
        if not self._client.list_runs():
            return 0
        known = self._client.get_run("preemption")
        assert {learner.learner_id for learner in known.learners} <= {"us"}
        return sum(int(fragment.version) for fragment in known.run.versions)

    def wait_for_versions(self, *, beyond: int) -> int:
        """Returns how many versions there are, once there are more than `beyond`."""
        try:
            wait_until(lambda: self.version_count() > beyond, what=f"more than {beyond} versions", timeout_s=180)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{tail(self.output)}\n{self.cluster.log_tails()}") from None
        return self.version_count()

    def wait_for_restart(self, count: int) -> None:
        """Waits until the job has been started again `count` times."""
        is_back = f"the job runs for the {count + 1}th time"
        wait_until(
            lambda: (job := self.cluster.job(self.number))["Restarts"] == str(count) and job["JobState"] == "RUNNING",
            what=is_back,
            timeout_s=180,
        )

    def says(self, text: str, count: int = 1) -> None:
        """Waits until the job has said something `count` times."""
        try:
            wait_until(lambda: self.output.read_text().count(text) >= count, what=f"{text!r} {count}×", timeout_s=90)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{tail(self.output)}") from None


def oldest_rank() -> psutil.Process | None:
    """Returns the process of the program that is not a data loader's, where there is one."""
    family = psutil.Process().children(recursive=True)
    commands = {process: words_of(process) for process in family}
    ranks = [process for process, words in commands.items() if words[1:3] == ["-u", str(_PROGRAM)]]
    return min(ranks, key=psutil.Process.create_time, default=None)


def words_of(process: psutil.Process) -> list[str]:
    """Returns a process's command line; nothing if it has ended."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


@pytest.mark.parametrize(
    "words",
    [("scontrol", "requeue"), ("scancel", "--signal=USR1", "--batch")],
    ids=["by an administrator or a pre-emption", "by the notice before the time limit"],
)
def test_a_learner_that_is_requeued_sends_its_work_and_comes_back_as_the_same_one(
    cluster: Slurm, tmp_path: Path, words: tuple[str, ...]
) -> None:
    with syncer() as target, Job(cluster, target, tmp_path) as job:
        job.wait_for_versions(beyond=2)
        run([*words, job.number], timeout_s=30, env=cluster.env)
        job.says("steps not sent: 0")
        job.wait_for_restart(1)
        job.wait_for_versions(beyond=job.version_count())


def test_a_rank_that_is_killed_starts_again_without_slurm(cluster: Slurm, tmp_path: Path) -> None:
    with syncer() as target, Job(cluster, target, tmp_path) as job:
        job.wait_for_versions(beyond=2)
        rank = oldest_rank()
        assert rank is not None
        rank.kill()
        wait_until(lambda: oldest_rank() not in {None, rank}, what="another rank runs", timeout_s=60)
        job.wait_for_versions(beyond=job.version_count())
        assert cluster.job(job.number)["Restarts"] == "0"
