"""Deltas that all ranks of an island encode and push, each its own parts."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from skerry.wire import Codec, Encoding
from skerry_syncer.rpc import capabilities
from tests.integration.ranks import push_programs
from tests.integration.ranks.ddp_programs import EXACT
from tests.integration.ranks.fsdp_programs import ALONE, TENSOR_PARALLEL, Layout, Weights
from tests.integration.ranks.push_programs import Faults, Sent
from tests.integration.ranks.ranks import run, values

PART_BYTES = 512
OPTIONS = {"policy": replace(EXACT, delta_encoding=Encoding(Codec.INT4))}


@pytest.fixture(autouse=True)
def small_parts() -> Iterator[None]:
    """Has learners cut deltas into parts of half a KiB."""
    with patch.object(capabilities, "SUGGESTED_PART_BYTES", PART_BYTES):
        yield


def _send(
    folder: Path, target: str, name: str, layout: Layout, faults: Faults | None = None
) -> tuple[list[Sent], list[Weights]]:
    """Returns what each rank of a learner sent, and its weights in the end."""
    count = max(1, layout.rank_count)
    ends = run(folder / name, push_programs.send_changes, count, target, layout, {**OPTIONS, "run": name}, faults)
    ranks = values(ends)
    assert [end.exit_code for end in ends] == [0] * count
    for _, _, stats in ranks:
        assert stats.deltas_acknowledged == len(stats.versions) * push_programs.DELTA_COUNT
    return [sent for sent, _, _ in ranks], [weights for _, weights, _ in ranks]


def _bytes_sent(ranks: list[Sent]) -> list[list[tuple[tuple[str, int, int], str]]]:
    """Returns the parts of all deltas by range, with the digests of their bytes; what came twice must be the same."""
    deltas: dict[str, dict[tuple[str, int, int], str]] = defaultdict(dict)
    for sent in ranks:
        for fragment, delta, first, numel, digest in sent.parts:
            assert deltas[delta].setdefault((fragment, first, numel), digest) == digest
    return sorted(sorted(parts.items()) for parts in deltas.values())


@pytest.mark.parametrize("layout", [Layout((2,)), Layout((4,)), TENSOR_PARALLEL, Layout((2, 2))], ids=str)
def test_ranks_push_the_bytes_of_one_process_each_its_share(target: str, tmp_path: Path, layout: Layout) -> None:
    (alone,), (weights,) = _send(tmp_path, target, "one", ALONE)
    ranks, ends = _send(tmp_path, target, "many", layout)
    assert _bytes_sent(ranks) == _bytes_sent([alone])
    assert sorted(ranks[0].completed) == sorted(alone.completed)
    assert not any(sent.completed for sent in ranks[1:])
    for end in ends:
        for name, expected in weights.items():
            np.testing.assert_array_equal(end[name], expected)
    for delta in ranks[0].bytes_by_delta:
        shares = [sent.bytes_by_delta[delta] for sent in ranks]
        assert max(shares) <= sum(shares) / len(shares) + 2 * PART_BYTES


def test_the_first_rank_sends_what_another_ones_broken_push_did_not(target: str, tmp_path: Path) -> None:
    (alone,), (weights,) = _send(tmp_path, target, "one", ALONE)
    ranks, ends = _send(tmp_path, target, "two", Layout((2,)), Faults(rank=1, cut_after=5))
    assert _bytes_sent(ranks) == _bytes_sent([alone])
    counts = Counter((fragment, delta) for fragment, delta, *_ in ranks[1].parts)
    assert len({(fragment, count) for (fragment, _), count in counts.items()}) == 3  # fewer of the delta that was cut
    assert sorted(ranks[0].completed) == sorted(alone.completed)
    for end in ends:
        for name, expected in weights.items():
            np.testing.assert_array_equal(end[name], expected)


def test_the_first_rank_sends_everything_if_another_one_does_not_reach_the_syncer(target: str, tmp_path: Path) -> None:
    (alone,), _ = _send(tmp_path, target, "one", ALONE)
    ranks, _ = _send(tmp_path, target, "two", Layout((2,)), Faults(rank=1, target="127.0.0.1:1"))
    assert _bytes_sent(ranks[:1]) == _bytes_sent([alone])


def test_an_island_killed_while_it_pushes_comes_back_with_another_number_of_ranks(target: str, tmp_path: Path) -> None:
    faults = Faults(rank=1, cut_after=5, is_killed=True)
    arguments = Layout((2,)), {**OPTIONS, "run": "island"}
    survivor, killed = run(tmp_path / "first", push_programs.send_changes, 2, target, *arguments, faults)
    assert killed.exit_code == -9
    assert survivor.message
    ranks, ends = _send(tmp_path, target, "island", Layout((4,)))
    (alone,), (weights,) = _send(tmp_path, target, "one", ALONE)
    assert _bytes_sent(ranks) == _bytes_sent([alone])
    for end in ends:
        for name, expected in weights.items():
            np.testing.assert_array_equal(end[name], expected)


def test_a_weight_of_one_rank_that_is_not_finite_has_all_load_the_runs_weights(target: str, tmp_path: Path) -> None:
    options = {**OPTIONS, "fragment_count": 1}
    for began, ended in values(run(tmp_path, push_programs.spoil, 2, target, Layout((2,)), options)):
        for name, weights in began.items():
            np.testing.assert_array_equal(ended[name], weights)
