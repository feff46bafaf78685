"""Islands of several processes, each with the whole model: ranks whose weights stay bit-equal, or who say why not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.integration.ranks import ddp_programs
from tests.integration.ranks.ranks import run, values


def test_all_ranks_have_the_same_weights_after_every_step(target: str, tmp_path: Path) -> None:
    count = 3
    ranks = values(run(tmp_path, ddp_programs.train_until_version, count, target, 3))
    assert all(rank == ranks[0] for rank in ranks[1:])
    steps, stats = ranks[0]["steps"], ranks[0]["stats"]
    assert sum(bool(changed) for changed, *_ in steps) >= 3
    assert steps[-1][2:] == (len(steps), len(steps) * sum(10 + rank for rank in range(count)))
    assert stats.loss == (count - 1) / 2
    assert stats.deltas_merged > 0
    assert ranks[0]["failure"] is None


def test_an_island_learns_what_one_process_learns_from_the_same_batches(target: str, tmp_path: Path) -> None:
    (alone,) = values(run(tmp_path / "alone", ddp_programs.train_in_turns, 1, target, True))
    first, second = values(run(tmp_path / "island", ddp_programs.train_in_turns, 2, target, False))
    for name, weights in alone.items():
        np.testing.assert_array_equal(first[name], second[name])
        np.testing.assert_allclose(first[name], weights, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize(
    ("how", "reasons", "message"),
    [
        ("error", ("ZeroDivisionError", "RANK_LEFT"), "a bad batch"),
        ("replaced", ("WEIGHTS_REPLACED", "WEIGHTS_REPLACED"), "a state dict was loaded"),
        ("tokens", ("ValueError", "RANK_LEFT"), "no fewer than 0 tokens"),
        ("flush", ("RANKS_DIFFER", "RANKS_DIFFER"), "the same calls in the same order"),
        ("drift", ("RANKS_DIFFER", "RANKS_DIFFER"), "the ranks' weights differ"),
    ],
)
def test_a_failure_of_one_rank_is_one_of_all(
    target: str, tmp_path: Path, *, how: str, reasons: tuple[str, str], message: str, who: int
) -> None:
    ends = run(tmp_path, ddp_programs.fail, 2, target, how, who)
    assert (ends[who].reason, ends[1 - who].reason) == reasons
    assert all(message in end.message for end in ends)


@pytest.mark.parametrize("who", [0, 1])
def test_all_ranks_leave_with_all_work_when_one_is_told_to(target: str, tmp_path: Path, who: int) -> None:
    ranks = values(run(tmp_path, ddp_programs.train_until_one_is_told_to_leave, 2, target, who))
    assert ranks == [{"code": 143, "steps": 7, "unsent": 0}] * 2


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_all_ranks_that_are_told_to_end_send_their_work(target: str, tmp_path: Path, kind: type[BaseException]) -> None:
    for end in values(run(tmp_path, ddp_programs.end, 2, target, (kind, kind))):
        assert (end["kind"], end["steps"], end["unsent"], end["lost"]) == (kind.__name__, 7, 0, [])


@pytest.mark.parametrize(
    "kinds", [(KeyboardInterrupt,), (SystemExit, KeyboardInterrupt), (ZeroDivisionError, ZeroDivisionError)]
)
def test_ranks_that_do_not_end_alike_say_how_much_is_lost(
    target: str, tmp_path: Path, kinds: tuple[type[BaseException], ...]
) -> None:
    first, second = values(run(tmp_path, ddp_programs.end, 2, target, kinds))
    assert first["kind"] == kinds[0].__name__
    assert second["kind"] == (kinds[1].__name__ if kinds[1:] else "StopExchangingError")
    (lost,) = first["lost"]
    assert "steps=" in lost
    assert second["lost"] == []
    assert max(first["took_s"], 0) < 20.0


def test_ranks_with_other_frozen_weights_are_refused_unless_allowed(target: str, tmp_path: Path) -> None:
    for number, allowed in enumerate([False, ["frozen.bias"]]):
        ends = run(tmp_path / f"refused-{number}", ddp_programs.join_with_frozen, 2, target, (1, 2), allowed)
        assert [end.reason for end in ends] == ["RANKS_DIFFER"] * 2
    assert values(run(tmp_path / "allowed", ddp_programs.join_with_frozen, 2, target, (1, 2), ["frozen.*"])) == [1, 1]


def test_a_rank_without_a_learner_is_named(target: str, tmp_path: Path) -> None:
    first, _ = run(tmp_path, ddp_programs.join_alone, 2, target)
    assert first.reason == "RANK_LEFT"
    assert "missing=[1]" in first.message


def test_ranks_of_two_learner_ids_are_refused(target: str, tmp_path: Path) -> None:
    ends = run(tmp_path, ddp_programs.join_with_ids, 2, target)
    assert [end.reason for end in ends] == ["RANKS_DIFFER"] * 2
    assert "the same run and learner" in ends[1].message


def test_what_the_first_rank_can_not_join_no_rank_joins(target: str, tmp_path: Path) -> None:
    ends = run(tmp_path, ddp_programs.join_missing_run, 2, target)
    assert [end.reason for end in ends] == ["RUN_NOT_FOUND"] * 2


def test_two_islands_may_be_of_one_world(target: str, tmp_path: Path) -> None:
    ranks = values(run(tmp_path, ddp_programs.train_two_islands, 4, target, 2))
    assert ranks[0] == ranks[1]
    assert ranks[2] == ranks[3]
    assert all(rank["failure"] is None for rank in ranks)


def test_all_ranks_may_follow_their_optimizers(target: str, tmp_path: Path) -> None:
    first, second = values(run(tmp_path, ddp_programs.follow_an_optimizer, 2, target))
    assert first == second
    stats = first["stats"]
    assert (stats.step_count, stats.token_count, stats.unsent_step_count) == (7, 7 * 21, 0)
    assert stats.deltas_acknowledged > 0
    merged, again = first["left"]
    assert merged
    assert merged.is_loaded is True
    assert again == merged
