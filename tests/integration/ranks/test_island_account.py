"""Islands that are killed and go on from their own checkpoint with another number of ranks: all work counts once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.integration.client.test_account import EXACT, ROUNDING
from tests.integration.ranks import account_programs
from tests.integration.ranks.fsdp_programs import ALONE, Layout
from tests.integration.ranks.ranks import run, values

SHARDS = Layout((2,))
# How an island's ranks hold the model, and how many there are, before and after.
CHANGES = {
    "DDP of 2, 3": ((ALONE, 2), (ALONE, 3)),
    "DDP of 2, shards of 2": ((ALONE, 2), (SHARDS, 2)),
    "shards of 2, 3": ((SHARDS, 2), (Layout((3,)), 3)),
    "shards of 4, DDP of 2": ((Layout((2, 2)), 4), (ALONE, 2)),
    "shards of 2, one process": ((SHARDS, 2), (ALONE, 1)),
    "one process, shards of 2": ((ALONE, 1), (SHARDS, 2)),
}


def _options(**policy: Any) -> dict[str, Any]:
    return {"policy": replace(EXACT, **policy), "fragment_count": 2}


def _killed(tmp_path: Path, target: str, layout: Layout, count: int, options: dict[str, Any]) -> list[dict[str, Any]]:
    """Has an island die, and returns what each rank had saved."""
    ends = run(tmp_path / "first", account_programs.save_and_be_killed, count, target, layout, tmp_path, options)
    assert [end.exit_code for end in ends] == [-9] * count, [end.message for end in ends]
    return [torch.load(tmp_path / f"state-{rank}", weights_only=True) for rank in range(count)]


@pytest.mark.parametrize("before_and_after", CHANGES.values(), ids=CHANGES)
def test_an_island_goes_on_from_its_state_with_other_ranks(
    target: str, tmp_path: Path, before_and_after: tuple[tuple[Layout, int], tuple[Layout, int]]
) -> None:
    (before, count), (after, new_count) = before_and_after
    options = _options()
    _killed(tmp_path, target, before, count, options)
    weights, step_count = torch.load(tmp_path / "weights-0", weights_only=False)
    ranks = values(run(tmp_path / "second", account_programs.go_on, new_count, target, after, tmp_path, options, {}))
    for began, step, ended, merged in ranks:
        assert step == step_count
        for name, expected in weights.items():
            np.testing.assert_allclose(began[name], expected, rtol=0, atol=ROUNDING)
            np.testing.assert_array_equal(merged[name], ranks[0][3][name])
            # One learner's steps, averaged alone, are what the run has in the end.
            np.testing.assert_allclose(merged[name], ended[name], rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("layout", [ALONE, SHARDS], ids=["DistributedDataParallel", "fully_shard"])
def test_a_delta_that_is_in_flight_is_part_of_an_island_s_state(target: str, tmp_path: Path, layout: Layout) -> None:
    options = _options(quorum_count=2)
    states = _killed(tmp_path, target, layout, 2, options)
    (fragment, *_) = (one for one in states[0]["fragments"].values() if one["delta"])
    assert fragment["delta"]["values"].abs().max() > 0
    weights, _ = torch.load(tmp_path / "weights-0", weights_only=False)
    program, more = account_programs.go_on, (layout, tmp_path, options, {"leave_s": 0.1})
    for began, *_ in values(run(tmp_path / "second", program, 2, target, *more)):
        for name, expected in weights.items():
            np.testing.assert_allclose(began[name], expected, rtol=0, atol=ROUNDING)


def test_what_ranks_save_of_shards_is_together_as_large_as_the_work(target: str, tmp_path: Path) -> None:
    whole, *others = _killed(tmp_path / "whole", target, ALONE, 2, _options() | {"run": "whole"})
    assert others == [{}]
    shares = _killed(tmp_path / "shares", target, SHARDS, 2, _options() | {"run": "shares"})
    for name, one in whole["fragments"].items():
        sizes = [len(share["fragments"][name]["unsent"]) for share in shares]
        assert sum(sizes) == len(one["unsent"])
        assert max(sizes) - min(sizes) <= 1


def test_an_island_without_a_share_of_its_state_says_which(target: str, tmp_path: Path) -> None:
    options = _options()
    _killed(tmp_path, target, SHARDS, 2, options)
    program = account_programs.go_on
    ends = run(tmp_path / "second", program, 2, target, SHARDS, tmp_path, options, {"left_out": "state-1"})
    assert [end.reason for end in ends] == ["ValueError"] * 2
    assert all("missing=[1], expected=2" in end.message for end in ends)


def test_shares_of_two_moments_are_refused(target: str, tmp_path: Path) -> None:
    options = _options() | {"run": "first"}
    for part in ("first", "second"):
        (tmp_path / part).mkdir()
        _killed(tmp_path / part, target, SHARDS, 2, options | {"run": part})
    (tmp_path / "first" / "state-1").write_bytes((tmp_path / "second" / "state-1").read_bytes())
    ends = run(tmp_path / "third", account_programs.go_on, 2, target, SHARDS, tmp_path / "first", options, {})
    assert [end.reason for end in ends] == ["ValueError"] * 2
    assert all("not of one moment" in end.message for end in ends)


def test_ranks_count_on_after_an_earlier_process_and_save_their_counts_after_leaving(
    target: str, tmp_path: Path
) -> None:
    assert values(run(tmp_path, account_programs.count_on, 2, target)) == [(8, 80, 8), (8, 80, None)]
