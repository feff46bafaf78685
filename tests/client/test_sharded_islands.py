"""Islands of several processes, each with shards of the model (`fully_shard`)."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.client import fsdp_programs
from tests.client.ddp_programs import EXACT
from tests.client.ranks import run, start, values


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


def test_islands_of_every_size_in_one_run_learn_what_single_processes_learn(target: str, tmp_path: Path) -> None:
    """The weights that the run ends with do not depend on how a learner's processes hold the model."""
    shapes: list[tuple[int, ...]] = [(), (2,), (2,), (4,)]
    ends = {
        "single": _train_together(tmp_path / "single", target, "single", [() for _ in shapes]),
        "mixed": _train_together(tmp_path / "mixed", target, "mixed", shapes),
    }
    for learner, (single, mixed) in enumerate(zip(ends["single"], ends["mixed"], strict=True)):
        for rank in mixed:
            for name, weights in single[0][1].items():
                np.testing.assert_allclose(rank[1][name], weights, rtol=1e-5, atol=1e-6, err_msg=f"{learner=} {name=}")


def _train_together(
    folder: Path, target: str, run_name: str, shapes: list[tuple[int, ...]]
) -> list[list[tuple[fsdp_programs.Weights, fsdp_programs.Weights]]]:
    """Trains one learner for each shape, in turns, all in one run; returns what each of its ranks returned."""
    folder.mkdir()
    policy = replace(EXACT, grace_factor=0.0)
    waits = []
    for number, shape in enumerate(shapes):
        options = {"policy": policy, "run": run_name, "learner_id": f"learner-{number}", "connect_timeout_s": 90.0}
        turns = fsdp_programs.Turns(number, len(shapes), folder)
        program, count = fsdp_programs.train_in_turns, math.prod(shape)
        waits.append(start(folder / f"ranks-{number}", program, count, target, shape, options, turns))
    return [values(wait()) for wait in waits]
