"""Islands of several processes, each with shards of the model (`fully_shard`)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from skerry import RunsClient
from tests.integration.ranks import fsdp_programs
from tests.integration.ranks.ddp_programs import EXACT
from tests.integration.ranks.fsdp_programs import ALONE, TENSOR_PARALLEL, Layout
from tests.integration.ranks.ranks import run, start, values
from tests.support.syncer_thread import syncer


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[fsdp_programs.Weights, fsdp_programs.Weights]:
    """The weights of one process, after joining and at the end."""
    with syncer() as target:
        folder = tmp_path_factory.mktemp("alone")
        (ends,) = values(run(folder, fsdp_programs.train_in_turns, 1, target, ALONE, {"policy": EXACT}))
    began, _, ended = ends
    assert any(not np.array_equal(weights, ended[name]) for name, weights in began.items())
    return began, ended


@pytest.mark.parametrize("layout", [ALONE, Layout((2,)), Layout((4,)), Layout((2, 2)), TENSOR_PARALLEL], ids=str)
def test_an_island_learns_what_one_process_learns_from_the_same_batches(
    target: str, tmp_path: Path, layout: Layout, alone: tuple[fsdp_programs.Weights, fsdp_programs.Weights]
) -> None:
    count = layout.rank_count if layout.shape else 2
    ranks = values(run(tmp_path, fsdp_programs.train_in_turns, count, target, layout, {"policy": EXACT}))
    for number, (began, merged, ended) in enumerate(ranks):
        for name, weights in alone[0].items():
            np.testing.assert_array_equal(began[name], weights)
            np.testing.assert_allclose(ended[name], alone[1][name], rtol=1e-5, atol=1e-6)
        assert merged.keys() == (set() if number else ended.keys()), "the first rank hands out the run's weights"
        for name, weights in merged.items():
            np.testing.assert_allclose(ended[name], weights, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "layout",
    [
        Layout((2, 2)),
        TENSOR_PARALLEL,
        pytest.param(Layout((2, 1, 2), is_tensor_parallel=True), marks=pytest.mark.long),
    ],
    ids=str,
)
def test_all_ranks_have_the_same_weights_after_every_adoption(target: str, tmp_path: Path, layout: Layout) -> None:
    """Training computes in bfloat16; what is exchanged is the optimizer's float32 weights, without the frozen ones."""
    ranks = values(run(tmp_path, fsdp_programs.train_until_version, layout.rank_count, target, layout, 3))
    for rank in ranks:
        assert rank["adopted"] == ranks[0]["adopted"]
        assert fsdp_programs.weights_digest(rank["ended"]) == fsdp_programs.weights_digest(ranks[0]["ended"])
    assert len(ranks[0]["adopted"]) >= 3
    assert ranks[0]["failure"] is None
    began, ended = ranks[0]["began"], ranks[0]["ended"]
    assert {name for name, weights in ended.items() if np.array_equal(weights, began[name])} == {"1.bias"}
    assert any((weights.view(np.uint32) & 0xFFFF).any() for weights in ended.values())
    with RunsClient(target) as client:
        assert {one.name for one in client.get_run("theirs").run.tensors} == ended.keys() - {"1.bias"}


@pytest.mark.parametrize("layout", [Layout((2,)), TENSOR_PARALLEL], ids=str)
def test_frozen_shards_are_compared_as_the_whole_that_they_are_of(target: str, tmp_path: Path, layout: Layout) -> None:
    program, count = fsdp_programs.join_with_frozen, layout.rank_count
    values(run(tmp_path / "alone", program, 1, target, ALONE, [1]))
    values(run(tmp_path / "same", program, count, target, layout, [1] * count))
    ends = run(tmp_path / "other", program, count, target, layout, [2] * count)
    assert [end.reason for end in ends] == ["FROZEN_DIFFERS"] * count


def test_replicas_of_frozen_shards_have_to_be_the_same(target: str, tmp_path: Path) -> None:
    ends = run(tmp_path, fsdp_programs.join_with_frozen, 4, target, Layout((2, 2)), [1, 1, 1, 2])
    assert [end.reason for end in ends] == ["RANKS_DIFFER"] * 4
    assert all("frozen values" in end.message for end in ends)


def test_ranks_of_tensor_parallelism_whose_common_weights_differ_are_told(target: str, tmp_path: Path) -> None:
    layout = Layout((1, 2), is_tensor_parallel=True)
    ends = run(tmp_path, fsdp_programs.drift, 2, target, layout)
    assert [end.reason for end in ends] == ["RANKS_DIFFER"] * 2
    assert all("first rank that holds the same weights=[1]" in end.message for end in ends)


def test_a_matrix_whose_rows_are_dealt_out_in_turn_is_refused(target: str, tmp_path: Path) -> None:
    ends = run(tmp_path, fsdp_programs.join_with_interleaved_rows, 2, target)
    assert {end.reason for end in ends} <= {"ValueError", "RANK_LEFT"}
    assert all("cut in a way that fully_shard and tensor parallelism do not use" in end.message for end in ends)


def test_fsdp1_is_refused(target: str, tmp_path: Path) -> None:
    ends = run(tmp_path, fsdp_programs.attach_fsdp1, 2, target)
    assert [end.reason for end in ends] == ["ValueError"] * 2
    assert all("fully_shard" in end.message and "FSDP1" in end.message for end in ends)


@pytest.mark.long
def test_islands_of_1_2_and_4_ranks_train_in_one_run(target: str, tmp_path: Path) -> None:
    waits = []
    for layout in (Layout((1,)), Layout((2,)), TENSOR_PARALLEL):
        name, count = f"of-{layout.rank_count}", layout.rank_count
        options = {"policy": replace(EXACT, grace_factor=0.0), "learner_id": name, "connect_timeout_s": 90.0}
        program = fsdp_programs.train_in_turns
        waits.append(start(tmp_path / name, program, count, target, layout, options))
    for wait in waits:
        ranks = values(wait())
        for *_, weights in ranks:
            for name, expected in ranks[0][2].items():
                np.testing.assert_array_equal(weights[name], expected)
    with RunsClient(target) as client:
        assert {learner.learner_id for learner in client.get_run("theirs").learners} == {"of-1", "of-2", "of-4"}


def test_a_learner_is_closed_though_all_process_groups_were_destroyed_before(target: str, tmp_path: Path) -> None:
    assert values(run(tmp_path, fsdp_programs.close_after_the_groups, 2, target, Layout((2,)))) == [None, None]
