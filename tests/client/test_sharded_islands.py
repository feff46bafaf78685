"""Islands of several processes, each with shards of the model (`fully_shard`)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.client import fsdp_programs
from tests.client.ddp_programs import EXACT
from tests.client.fsdp_programs import ALONE, TENSOR_PARALLEL, Layout
from tests.client.ranks import run, start, values


@pytest.mark.parametrize("layout", [Layout((2,)), Layout((4,)), Layout((2, 2)), TENSOR_PARALLEL], ids=str)
def test_shards_learn_what_one_process_learns_from_the_same_batches(
    target: str, tmp_path: Path, layout: Layout
) -> None:
    program, options = fsdp_programs.train_in_turns, {"policy": EXACT}
    (alone,) = values(run(tmp_path / "one", program, 1, target, ALONE, {**options, "run": "one"}))
    ranks = values(run(tmp_path / "many", program, layout.rank_count, target, layout, {**options, "run": "many"}))
    for began, ended in ranks:
        for name, weights in alone[0].items():
            np.testing.assert_array_equal(began[name], weights)
            np.testing.assert_allclose(ended[name], alone[1][name], rtol=1e-5, atol=1e-6)
    assert any(not np.array_equal(alone[0][name], alone[1][name]) for name in alone[0])


def test_ranks_of_tensor_parallelism_whose_common_weights_differ_are_told(target: str, tmp_path: Path) -> None:
    layout = Layout((1, 2), is_tensor_parallel=True)
    ends = run(tmp_path, fsdp_programs.drift, 2, target, layout)
    assert [end.reason for end in ends] == ["RANKS_DIFFER"] * 2
    assert all("first rank that holds the same weights=[1]" in end.message for end in ends)


def test_a_matrix_whose_rows_are_dealt_out_in_turn_is_refused(target: str, tmp_path: Path) -> None:
    ends = run(tmp_path, fsdp_programs.join_with_interleaved_rows, 2, target)
    assert {end.reason for end in ends} <= {"ValueError", "RANK_LEFT"}
    assert all("cut in a way that fully_shard and tensor parallelism do not use" in end.message for end in ends)


_LAYOUTS = [
    [ALONE, TENSOR_PARALLEL],
    pytest.param(
        [ALONE, Layout((2,)), Layout((2,)), Layout((4,))],
        marks=pytest.mark.e2e,  # 13 processes, a minute on two busy cores
    ),
]


@pytest.mark.parametrize("layouts", _LAYOUTS, ids=lambda some: str([one.shape for one in some]))
def test_islands_of_every_size_in_one_run_learn_what_single_processes_learn(
    target: str, tmp_path: Path, layouts: list[Layout]
) -> None:
    """The weights that the run ends with do not depend on how a learner's processes hold the model."""
    ends = {
        "single": _train_together(tmp_path / "single", target, "single", [ALONE for _ in layouts]),
        "mixed": _train_together(tmp_path / "mixed", target, "mixed", layouts),
    }
    for learner, (single, mixed) in enumerate(zip(ends["single"], ends["mixed"], strict=True)):
        for rank in mixed:
            for name, weights in single[0][1].items():
                np.testing.assert_array_equal(rank[1][name], mixed[0][1][name])
                np.testing.assert_allclose(rank[1][name], weights, rtol=1e-5, atol=1e-6, err_msg=f"{learner=} {name=}")


def _train_together(
    folder: Path, target: str, run_name: str, layouts: list[Layout]
) -> list[list[tuple[fsdp_programs.Weights, fsdp_programs.Weights]]]:
    """Trains one learner for each layout, in turns, all in one run; returns what each of its ranks returned."""
    folder.mkdir()
    policy = replace(EXACT, grace_factor=0.0)
    waits = []
    for number, layout in enumerate(layouts):
        options = {"policy": policy, "run": run_name, "learner_id": f"learner-{number}", "connect_timeout_s": 90.0}
        turns = fsdp_programs.Turns(number, len(layouts), folder)
        program, count = fsdp_programs.train_in_turns, layout.rank_count
        waits.append(start(folder / f"ranks-{number}", program, count, target, layout, options, turns))
    return [values(wait()) for wait in waits]
