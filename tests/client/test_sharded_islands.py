"""Islands of several processes, each with shards of the model (`fully_shard`)."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from tests.client import fsdp_programs
from tests.client.ddp_programs import EXACT
from tests.client.ranks import run, values


@pytest.mark.parametrize("shape", [(2,), (4,), (2, 2)], ids=str)
def test_shards_learn_what_one_process_learns_from_the_same_batches(
    target: str, tmp_path: Path, shape: tuple[int, ...]
) -> None:
    program, options = fsdp_programs.train_in_turns, {"policy": EXACT}
    (alone,) = values(run(tmp_path / "one", program, 1, target, (), {**options, "run": "one"}))
    ranks = values(run(tmp_path / "many", program, math.prod(shape), target, shape, {**options, "run": "many"}))
    for began, ended in ranks:
        for name, weights in alone[0].items():
            np.testing.assert_array_equal(began[name], weights)
            np.testing.assert_allclose(ended[name], alone[1][name], rtol=1e-5, atol=1e-6)
    assert any(not np.array_equal(alone[0][name], alone[1][name]) for name in alone[0])


def test_tensor_parallelism_under_fully_shard_is_refused(target: str, tmp_path: Path) -> None:
    ends = run(tmp_path, fsdp_programs.join_with_tensor_parallelism, 4, target)
    assert any("tensor parallelism and fully_shard" in end.message for end in ends)
    assert {end.reason for end in ends} <= {"ValueError", "RANK_LEFT"}
