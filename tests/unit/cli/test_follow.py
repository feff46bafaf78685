"""`skerry follow` of a run that is trained meanwhile, against a real syncer."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from skerry import ArrayLearner, Learner, RunsClient
from skerry.checkpoints.base_model import BaseModel
from skerry.checkpoints.folders import WEIGHTS, version_numbers
from skerry.checkpoints.publisher import Publisher
from skerry.checkpoints.pulling import pull_weights
from skerry.cli import failures
from skerry.cli.follow import follow
from skerry.follower import Follower
from tests.support.adapted import Adapted
from tests.support.quadratic import QUICK, Quadratic, train_until


def test_a_closed_run_ends_with_its_last_weights_in_a_folder(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["fit", "--target", target, "--out", str(tmp_path / "out")]
    with RunsClient(target) as client:
        (fragment,) = client.create_run("fit", {"weight": np.arange(6, dtype=np.float32)}).fragments
        (record,) = client.list_versions("fit", fragment.name)
        client.close_run("fit")
    assert failures.run(follow, words) == 0
    assert capsys.readouterr().out == f"weight_v000001: position {record.position}, full, 24 B, 100% of a full one\n"
    assert failures.run(follow, [*words, "--dtype", "bfloat16", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["folder"], said["sizes"]) == (str(tmp_path / "out" / "weight_v000002"), {"full": 12})


def test_what_a_model_lacks_is_said(target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Learner(Adapted(), target=target, run="fit", learner_id="us", create=True).close()
    assert failures.run(follow, ["fit", "--target", target, "--out", str(tmp_path / "out")]) == 2
    assert "give the file that has them as --base" in capsys.readouterr().err


def test_checkpoints_of_late_lagging_and_steady_engines_are_the_runs_weights(target: str, tmp_path: Path) -> None:
    problem, out = Quadratic(), tmp_path / "out"
    publisher = Publisher(out, base=BaseModel((), ()), like=None, dtype="original", keep=9)
    with (
        ArrayLearner(problem.arrays, target=target, run="fit", learner_id="us", create=True, policy=QUICK) as learner,
        Follower(target, "fit") as follower,
    ):
        for number, version in enumerate(follower, 1):
            publisher.publish(version)
            pull_weights(tmp_path / "steady", out, number)
            if number == 1:
                pull_weights(tmp_path / "lagging", out, number)
            if number == 20:
                break
            newer = sum(version.versions.values())
            train_until([(problem, learner)], lambda: sum(learner.stats.versions.values()) > newer)  # noqa: B023 - at once
    last = version_numbers(out)[-1]
    for name in ("lagging", "late"):
        pull_weights(tmp_path / name, out, last)
    with RunsClient(target) as client:
        weights = dict(client.pull(client.run_at("fit", version.position)))
    for name in ("steady", "lagging", "late"):
        tensors = load_file(tmp_path / name / WEIGHTS)
        assert tensors.keys() == weights.keys()
        assert all(np.array_equal(tensors[key], weights[key]) for key in weights)


KILLED_AT_FSYNC = """
import os, signal, sys
left, sync = int(sys.argv.pop(1)), os.fsync

def counted(descriptor):
    global left
    sync(descriptor)
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)

os.fsync = counted
from skerry.cli.follow import follow
follow()
"""


@pytest.mark.parametrize("count", [1, 4, 7])
def test_a_follower_that_is_killed_between_writes_is_started_again(count: int, target: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with RunsClient(target) as client:
        run = client.create_run("fit", {"weight": np.ones((40, 8), np.float32)}, policy=QUICK)
        command = [sys.executable, "-c", KILLED_AT_FSYNC, str(count), "fit", "--target", target, "--out", str(out)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            while process.poll() is None:
                process.stdout.readline()  # a version is written, or it was killed
                run = client.roll_back("fit", run.position)
        assert process.returncode == -signal.SIGKILL
        arrays = {"weight": np.ones((40, 8), np.float32)}
        with ArrayLearner(arrays, target=target, run="fit", learner_id="us") as learner:
            arrays["weight"][:] = 2
            learner.step(tokens=8)
        client.close_run("fit")
        weights = dict(client.pull("fit"))
    assert failures.run(follow, ["fit", "--target", target, "--out", str(out)]) == 0
    pull_weights(tmp_path / "local", out, version_numbers(out)[-1])
    assert np.array_equal(load_file(tmp_path / "local" / WEIGHTS)["weight"], weights["weight"])
    assert not np.array_equal(weights["weight"], np.ones((40, 8)))
    assert not list(out.glob(".*"))
