"""torchtitan, by the recipe of examples/torchtitan_recipe.py: ranks with shards, and ranks that are tensor parallel."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.e2e.trainers.two_islands import assert_merged, train_two_islands

_TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


def test_two_islands_one_is_killed_and_the_merged_model_is_at_all_ranks(target: str, tmp_path: Path) -> None:
    program = str(Path(__file__).with_name("titan_on_cpu"))
    out = train_two_islands(program, target, "titan", tmp_path, step_count=60, launcher=_TORCHRUN)
    assert_merged(target, "titan", torch.load(out / "merged.pt"))
