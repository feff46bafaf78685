"""A loop of one's own with accelerate as a learner."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.e2e.trainers.two_islands import assert_merged, train_two_islands

# `accelerate launch` starts one process on CPUs, unless MPI is there.
_TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


def test_two_islands_one_is_killed_and_the_merged_model_loads(target: str, tmp_path: Path) -> None:
    out = train_two_islands("accelerate_loop", target, "accelerate", tmp_path)
    assert_merged(target, "accelerate", load_file(out / "model.safetensors"))


def test_two_ranks_beside_an_island_of_one_end_with_the_runs_weights(target: str, tmp_path: Path) -> None:
    program = str(Path(__file__).with_name("accelerate_ranks"))
    out = train_two_islands(program, target, "accelerate", tmp_path, launcher=_TORCHRUN, killed_launcher=())
    ranks = [torch.load(path) for path in sorted(out.glob("rank-*.pt"))]
    assert [rank["wrapped"] for rank in ranks] == ["DistributedDataParallel"] * 2
    assert [rank["counts"] for rank in ranks] == [(240, 240 * 2 * 32, 0)] * 2
    for weights in (*(rank["weights"] for rank in ranks), load_file(out / "model.safetensors")):
        assert_merged(target, "accelerate", weights)
