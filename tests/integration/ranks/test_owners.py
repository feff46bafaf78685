"""Islands of which each fragment has one rank that exchanges it."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from skerry import ArrayLearner, RunNotFoundError, RunsClient
from skerry.wire import Codec, Encoding
from tests.integration.ranks import owner_programs
from tests.integration.ranks.ddp_programs import EXACT, POLICY
from tests.integration.ranks.fsdp_programs import ALONE, TENSOR_PARALLEL, Layout, Weights
from tests.integration.ranks.owner_programs import Faults, Sent
from tests.integration.ranks.ranks import network, run, start, values
from tests.support.syncer_thread import syncer

OPTIONS = {"policy": replace(EXACT, delta_encoding=Encoding(Codec.INT4))}


def _send(
    folder: Path, target: str, name: str, layout: Layout, *, count: int, faults: Faults | None = None, **options: float
) -> tuple[list[Sent], list[Weights]]:
    """Returns what each rank of a learner sent, and its weights in the end."""
    given = {**OPTIONS, **options, "run": name}
    ranks = values(run(folder / name, owner_programs.send_changes, count, target, layout, given, faults))
    for _, _, stats in ranks:
        assert stats.deltas_acknowledged == len(stats.versions) * owner_programs.DELTA_COUNT
    return [sent for sent, _, _ in ranks], [weights for _, weights, _ in ranks]


def _assert_equal(ends: list[Weights], weights: Weights) -> None:
    for end in ends:
        for name, expected in weights.items():
            np.testing.assert_array_equal(end[name], expected)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Sent, Weights]:
    """What one process sends, and its weights in the end."""
    with syncer() as target:
        (sent,), (weights,) = _send(tmp_path_factory.mktemp("alone"), target, "one", ALONE, count=1)
    return sent, weights


@pytest.mark.parametrize(
    ("count", "layout"),
    [(2, ALONE), (2, Layout((2,))), (3, Layout((3,))), (4, TENSOR_PARALLEL), (4, Layout((2, 2)))],
    ids=str,
)
def test_each_rank_sends_whole_fragments_in_the_bytes_of_one_process(
    target: str, tmp_path: Path, count: int, layout: Layout, alone: tuple[Sent, Weights]
) -> None:
    ranks, ends = _send(tmp_path, target, "many", layout, count=count)
    assert [len(sent) for sent in ranks] == [len(range(rank, 4, count)) for rank in range(count)]
    assert {fragment: parts for sent in ranks for fragment, parts in sent.items()} == alone[0]
    _assert_equal(ends, alone[1])


def test_others_exchange_the_fragments_of_a_rank_that_does_not_reach_the_syncer(
    target: str, tmp_path: Path, alone: tuple[Sent, Weights]
) -> None:
    ranks, ends = _send(
        tmp_path, target, "two", Layout((2,)), count=2, faults=Faults(rank=1, is_cut_off=True), connect_timeout_s=5.0
    )
    assert ranks == [alone[0], {}]
    _assert_equal(ends, alone[1])


@pytest.mark.parametrize("who", [0, 1])
def test_an_island_killed_while_it_pushes_comes_back_with_another_number_of_ranks(
    target: str, tmp_path: Path, who: int
) -> None:
    """The run ends with what one process gives it: nothing of the first life's is merged twice."""
    arguments = Layout((2,)), {**OPTIONS, "run": "island"}, Faults(rank=who, dies_pushing=True)
    ends = run(tmp_path / "first", owner_programs.send_changes, 2, target, *arguments)
    assert ends[who].exit_code == -9
    assert ends[1 - who].message
    _, weights = _send(tmp_path, target, "island", Layout((3,)), count=3)
    _assert_equal(weights[1:], weights[0])
    with RunsClient(target) as client:
        found = client.get_run("island").run
        merged = [
            (fragment.name, fate.delta_id)
            for fragment in found.fragments
            for version in client.list_versions("island", fragment.name)
            for fate in version.merged
        ]
        assert len(merged) == len(set(merged)) >= len(found.fragments) * owner_programs.DELTA_COUNT
        pulled = dict(client.pull(found))
    for name, expected in weights[0].items():
        np.testing.assert_array_equal(pulled[name], expected)


def test_weights_that_are_not_finite_are_restored_at_one_step_at_all_ranks(target: str, tmp_path: Path) -> None:
    """Weights of one fragment that stayed infinite for a step would spoil the others again."""
    options = {"policy": replace(POLICY, inner_step_count=4)}
    for began, restored, *_ in values(run(tmp_path, owner_programs.spoil, 2, target, Layout((2,)), options)):
        for name, weights in began.items():
            np.testing.assert_array_equal(restored[name], weights)


def test_all_ranks_stop_where_the_exchange_of_the_first_one_stops(target: str, tmp_path: Path) -> None:
    wait = start(tmp_path, owner_programs.train_until_stopped, 2, target, Layout((2,)), {"policy": POLICY})
    with RunsClient(target) as client:
        while not _is_attached(client):
            time.sleep(0.05)
    arrays = {name: tensor.detach().numpy() for name, tensor in network().named_parameters()}
    with ArrayLearner(arrays, target=target, run="theirs", learner_id="island"):
        assert values(wait()) == ["SESSION_FENCED"] * 2


def _is_attached(client: RunsClient) -> bool:
    try:
        return any(learner.is_live for learner in client.get_run("theirs").learners)
    except RunNotFoundError:
        return False
