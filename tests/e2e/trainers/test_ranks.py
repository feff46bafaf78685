"""Trainers of several processes: one island, whose ranks all end with the run's weights, or all with an error."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import LlamaForCausalLM

from examples.lightning_trainer import Rotation
from tests.e2e.trainers.two_islands import assert_merged

_TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
# Lightning starts the second rank by itself.
_STARTED = {"transformers": _TORCHRUN, "fsdp": _TORCHRUN, "lightning": (), "model_parallel": ()}
_TOKENS = {"transformers": 2 * 2 * 2 * 8, "fsdp": 2 * 2 * 2 * 8, "lightning": 2 * 5, "model_parallel": 2 * 5}


def _run(kind: str, target: str, folder: Path, life: str) -> tuple[int, str]:
    """Returns the exit status and what was printed."""
    with subprocess.Popen(
        [sys.executable, *_STARTED[kind], "-m", "tests.e2e.trainers.island_of_ranks", kind, target, str(folder),
         life],
        env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as started:  # fmt: skip
        try:
            printed, _ = started.communicate(timeout=90)
        except subprocess.TimeoutExpired:
            for process in psutil.Process(started.pid).children(recursive=True):
                process.kill()
            started.kill()
            raise
    return started.returncode, printed


@pytest.mark.parametrize("kind", _STARTED)
def test_two_ranks_are_one_learner_and_end_with_the_runs_weights(kind: str, target: str, tmp_path: Path) -> None:
    status, printed = _run(kind, target, tmp_path, "whole")
    assert status == 0, printed
    (first, weights), (second, others) = (torch.load(tmp_path / f"whole-{rank}.pt")[-1] for rank in range(2))
    assert first == second == (7, 7 * _TOKENS[kind], 0)
    assert all(map(torch.equal, weights, others))
    load: Any = LlamaForCausalLM.from_pretrained if kind in {"transformers", "fsdp"} else Rotation.load_from_checkpoint
    loaded = load(tmp_path / "merged")
    assert_merged(target, "ranks", dict(loaded.named_parameters()))


def test_an_error_of_one_rank_ends_both_at_once(target: str, tmp_path: Path) -> None:
    """The rank that fails does not wait for the other one, which waits for it in the backward pass."""
    status, printed = _run("transformers", target, tmp_path, "failing")
    assert status != 0
    assert "a bad batch" in printed, printed
    assert list(tmp_path.glob("failing-*.pt")) == []


@pytest.mark.parametrize("kind", ["fsdp", "lightning"])
def test_ranks_that_are_killed_resume_with_the_runs_weights_and_count_on(
    kind: str, target: str, tmp_path: Path
) -> None:
    printed = [_run(kind, target, tmp_path, life)[1] for life in ("killed", "resumed")]
    for rank in range(2):
        paths = [tmp_path / f"{life}-{rank}.pt" for life in ("killed", "resumed")]
        assert all(path.is_file() for path in paths), printed
        before, after = map(torch.load, paths)
        assert [(counts[0], counts[2]) for counts, _ in before] == [(0, 0), (1, 1), (2, 2), (3, 3)]
        assert [(counts[0], counts[2]) for counts, _ in after] == [(2, 0)], printed[1]
        assert all(map(torch.equal, before[0][1], after[0][1]))  # the run has no version but the first
