"""Islands of several processes, each with the whole model: ranks whose weights stay bit-equal, or who say why not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.ranks import ddp_programs, fsdp_programs
from tests.integration.ranks.fsdp_programs import ALONE
from tests.integration.ranks.ranks import run, values


def test_all_ranks_have_the_same_weights_after_every_step(target: str, tmp_path: Path) -> None:
    count = 3
    ranks = values(run(tmp_path, ddp_programs.train_until_version, count, target, 3, count))
    assert all(rank == ranks[0] for rank in ranks[1:])
    steps, stats = ranks[0]["steps"], ranks[0]["stats"]
    assert sum(bool(changed) for changed, *_ in steps) >= 3
    step_tokens = sum(10 + rank for rank in range(count))
    assert steps[-1][2:4] == (len(steps), len(steps) * step_tokens)
    assert steps[0][4] == pytest.approx(step_tokens / 10**6)
    assert steps[0][4] < steps[-1][4] < 1
    assert stats.loss == (count - 1) / 2
    assert stats.deltas_merged > 0
    assert ranks[0]["failure"] is None


@pytest.mark.long
def test_the_ranks_of_a_machine_share_one_syncer_over_a_store(tmp_path: Path) -> None:
    ranks = values(run(tmp_path, ddp_programs.train_over_store, 2, f"file://{tmp_path}/served"))
    assert ranks[0][0] == ranks[1][0] > 1
    assert [started for _, started in ranks] == [1, 0]


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


@pytest.mark.parametrize(
    ("endings", "kind"),
    [
        (("leave",), "SystemExit"),
        (("", "leave"), "SystemExit"),
        (("KeyboardInterrupt", "KeyboardInterrupt"), "KeyboardInterrupt"),
        (("SystemExit", "SystemExit"), "SystemExit"),
    ],
)
def test_all_ranks_send_their_work_when_one_is_told_to_leave_or_all_are_to_end(
    target: str, tmp_path: Path, endings: tuple[str, ...], kind: str
) -> None:
    for end in values(run(tmp_path, ddp_programs.end, 2, target, endings)):
        assert (end["kind"], end["steps"], end["unsent"], end["lost"]) == (kind, 7, 0, [])
        assert end["code"] == (143 if "leave" in endings else None)


@pytest.mark.parametrize(
    "endings", [("KeyboardInterrupt",), ("SystemExit", "KeyboardInterrupt"), ("ZeroDivisionError", "ZeroDivisionError")]
)
def test_ranks_that_do_not_end_alike_say_how_much_is_lost(
    target: str, tmp_path: Path, endings: tuple[str, ...]
) -> None:
    first, second = values(run(tmp_path, ddp_programs.end, 2, target, endings))
    assert (first["kind"], second["kind"]) == (*endings, "StopExchangingError")[:2]
    (lost,) = first["lost"]
    assert any(name.endswith("_steps") for name in lost)
    assert second["lost"] == []
    assert first["took_s"] < 20.0


def test_ranks_with_other_frozen_weights_are_refused_unless_allowed(target: str, tmp_path: Path) -> None:
    for number, allowed in enumerate(([], ["1.bias"])):
        ends = run(tmp_path / str(number), fsdp_programs.join_with_frozen, 2, target, ALONE, (1, 2), allowed)
        assert [end.reason for end in ends] == ["RANKS_DIFFER"] * 2
    values(run(tmp_path / "allowed", fsdp_programs.join_with_frozen, 2, target, ALONE, (1, 2), ["1.*", "4.*"]))


_UNJOINABLE: dict[str, tuple[tuple[dict[str, Any] | None, ...], list[str], str]] = {
    "a rank without a learner": (({"connect_timeout_s": 1.0}, None), ["RANK_LEFT", ""], "missing=[1]"),
    "two learner ids": (({}, {"learner_id": "other"}), ["RANKS_DIFFER"] * 2, "the same run and learner"),
    "a run that the first can't join": (({"create": False},) * 2, ["RUN_NOT_FOUND"] * 2, "run"),
}


@pytest.mark.parametrize("case", _UNJOINABLE)
def test_ranks_join_together_or_not_at_all(target: str, tmp_path: Path, case: str) -> None:
    options, reasons, message = _UNJOINABLE[case]
    ends = run(tmp_path, ddp_programs.join, 2, target, options)
    assert [end.reason for end in ends] == reasons
    assert message in ends[0].message


def test_two_islands_may_be_of_one_world(target: str, tmp_path: Path) -> None:
    ranks = values(run(tmp_path, ddp_programs.train_until_version, 4, target, 2, 2))
    for first, second in (ranks[:2], ranks[2:]):
        assert first == second
        assert first["failure"] is None
