"""torchtitan, by the recipe of examples/torchtitan_recipe.py: ranks with shards, and ranks that are tensor parallel."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

from tests.e2e.trainers.two_islands import assert_merged, train_two_islands

_TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


def test_two_islands_one_is_killed_and_the_merged_model_is_at_all_ranks(target: str, tmp_path: Path) -> None:
    program = str(Path(__file__).with_name("titan_on_cpu"))
    out = train_two_islands(program, target, "titan", tmp_path, step_count=60, launcher=_TORCHRUN)
    assert_merged(target, "titan", torch.load(out / "merged.pt"))


def test_a_job_that_begins_at_its_last_step_ends_as_such(target: str, tmp_path: Path) -> None:
    program = Path(__file__).with_name("titan_on_cpu.py")
    ended = subprocess.run(
        [sys.executable, *_TORCHRUN, str(program), "island", "0", str(tmp_path / "out")], cwd=tmp_path,
        env=os.environ | {"SKERRY_TARGET": target, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "out" / "merged.pt").is_file()
