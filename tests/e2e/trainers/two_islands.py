"""Two islands of an example in `examples/`, as processes of their own, one of which is killed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
import psutil
import torch

from skerry import ArrayLearner, RunNotFoundError, RunsClient

_EXAMPLES: Final = Path(__file__).parents[3] / "examples"
_TIMEOUT_S: Final = 150.0


def train_two_islands(
    example: str,
    target: str,
    run: str,
    folder: Path,
    *,
    step_count: int = 240,
    launcher: Sequence[str] = (),
) -> Path:
    """Returns what one island of the example wrote at its end, after the other was killed in the midst of the run.

    `launcher` is what Python is given before the program.
    """
    command = [sys.executable, *launcher, str(_EXAMPLES / f"{example}.py")]
    with ExitStack() as islands, RunsClient(target) as runs:
        killed = islands.enter_context(_island(command, target, "killed", 10**6, folder))
        islands.callback(_kill, killed)
        _wait_for_contributors(runs, run, {"killed"}, folder)
        base = runs.get_policy(run)
        runs.set_policy(run, replace(base, lease_term_s=2.0), base=base)
        ending = islands.enter_context(_island(command, target, "ending", step_count, folder))
        islands.callback(_kill, ending)
        _wait_for_contributors(runs, run, {"killed", "ending"}, folder)
        _kill(killed)
        assert ending.wait(_TIMEOUT_S) == 0, _printed(folder, "ending")
        return folder / "ending"


def assert_merged(target: str, run: str, weights: Mapping[str, torch.Tensor]) -> None:
    """Checks that `weights` are the newest of the run, bit for bit."""
    arrays = {name: np.zeros(tensor.shape, np.float32) for name, tensor in weights.items()}
    # Arrays have no frozen part that could be compared with the run's.
    with ArrayLearner(arrays, target=target, run=run, learner_id="auditor", allow_other_frozen=True):
        pass
    for name, tensor in weights.items():
        assert np.array_equal(tensor.detach().numpy(), arrays[name]), name


def _kill(island: subprocess.Popen[bytes]) -> None:
    """Kills it and the ranks that it has started."""
    if island.poll() is None:
        for process in psutil.Process(island.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        island.kill()


def _island(command: Sequence[str], target: str, learner_id: str, steps: int, folder: Path) -> subprocess.Popen[bytes]:
    arguments = [learner_id, str(steps), str(folder / learner_id)]
    environment = os.environ | {"SKERRY_TARGET": target, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with (folder / f"{learner_id}.txt").open("w") as printed:
        return subprocess.Popen(
            [*command, *arguments], cwd=folder, env=environment, stdout=printed, stderr=subprocess.STDOUT
        )


def _printed(folder: Path, learner_id: str) -> str:
    return (folder / f"{learner_id}.txt").read_text()


def _wait_for_contributors(runs: RunsClient, run: str, wanted: set[str], folder: Path) -> None:
    """Waits until some version was merged of deltas by all of them."""
    until_s = time.monotonic() + _TIMEOUT_S
    while not wanted <= _contributors(runs, run):
        printed = "\n".join(_printed(folder, one) for one in wanted)
        is_alive = time.monotonic() < until_s and "Traceback" not in printed
        assert is_alive, f"no version was merged of deltas by {wanted}: {printed}"
        time.sleep(0.2)


def _contributors(runs: RunsClient, run: str) -> set[str]:
    """Returns whose deltas made the version that has most contributors."""
    try:
        fragment = runs.get_run(run).run.fragments[0].name
    except RunNotFoundError:
        return set()
    versions = [{one.learner_id for one in version.merged} for version in runs.list_versions(run, fragment)]
    return max(versions, key=len, default=set())
