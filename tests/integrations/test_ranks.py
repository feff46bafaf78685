"""Trainers of several processes: one island, whose ranks all end with the run's weights, or all with an error."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import LlamaForCausalLM

from examples.lightning_trainer import Rotation
from skerry.integrations.callbacks import save_state, saved_states
from tests.integrations.two_islands import assert_merged

_TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
# Lightning starts the second rank by itself.
_STARTED = {"transformers": _TORCHRUN, "fsdp": _TORCHRUN, "lightning": (), "model_parallel": ()}
_TOKENS = {"transformers": 2 * 2 * 2 * 8, "fsdp": 2 * 2 * 2 * 8, "lightning": 2 * 5, "model_parallel": 2 * 5}


def _run(program: str, kind: str, target: str, folder: Path, *more: str) -> tuple[int, str]:
    """Returns the exit status and what was printed."""
    with subprocess.Popen(
        [sys.executable, *_STARTED[kind], "-m", f"tests.integrations.{program}", kind, target, str(folder), *more],
        env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as started:  # fmt: skip
        try:
            printed, _ = started.communicate(timeout=90)
        except subprocess.TimeoutExpired:
            for process in psutil.Process(started.pid).children(recursive=True):
                process.kill()
            started.kill()
            raise
    return started.returncode, printed


@pytest.mark.parametrize("kind", _STARTED)
def test_two_ranks_are_one_learner_and_end_with_the_runs_weights(kind: str, target: str, tmp_path: Path) -> None:
    status, printed = _run("island_of_ranks", kind, target, tmp_path, "-1")
    assert status == 0, printed
    first, second = (torch.load(tmp_path / f"rank-{rank}.pt") for rank in range(2))
    assert first["counts"] == second["counts"] == (7, 7 * _TOKENS[kind], 0, 7)
    for name, weights in first["weights"].items():
        assert torch.equal(weights, second["weights"][name])
    load: Any = LlamaForCausalLM.from_pretrained if kind in {"transformers", "fsdp"} else Rotation.load_from_checkpoint
    loaded = load(tmp_path / "merged")
    assert_merged(target, "ranks", dict(loaded.named_parameters()))


@pytest.mark.parametrize("kind", ["transformers", "lightning"])
def test_an_error_of_one_rank_ends_both_at_once(kind: str, target: str, tmp_path: Path) -> None:
    """The rank that fails does not wait for the other one, which waits for it in the backward pass."""
    status, printed = _run("island_of_ranks", kind, target, tmp_path, "1")
    assert status != 0
    assert "a bad batch" in printed, printed
    assert list(tmp_path.glob("rank-*.pt")) == []


@pytest.mark.parametrize("kind", _STARTED)
def test_ranks_that_are_killed_go_on_with_the_work_of_their_checkpoint(kind: str, target: str, tmp_path: Path) -> None:
    outdated = tmp_path / "last.ckpt" / "skerry-2.pt"  # as of an earlier checkpoint of three ranks
    if kind == "model_parallel":
        outdated.parent.mkdir()
        outdated.touch()
    said = [_run("resumed_ranks", kind, target, tmp_path, life)[1] for life in ("0", "1")]
    assert not outdated.exists()
    for rank in range(2):
        paths = [tmp_path / f"rank-{rank}-{life}.pt" for life in range(2)]
        assert all(path.is_file() for path in paths), said
        first, second = map(torch.load, paths)
        assert first["counts"] == [(0, 0), (1, 1), (2, 2), (3, 3)]
        assert second["counts"] == [(2, 2)], said[1]
        for began, saved, restored in zip(first["weights"][0], first["weights"][2], *second["weights"], strict=True):
            torch.testing.assert_close(restored, saved)
            assert not torch.equal(restored, began)


@pytest.mark.parametrize("begun", ["model_parallel", "lightning"])
def test_one_rank_goes_on_with_a_checkpoint_of_two_and_two_with_its_own(
    begun: str, target: str, tmp_path: Path
) -> None:
    said, seen = [], []
    for life, (kind, count) in enumerate([(begun, 2), ("model_parallel", 1), ("model_parallel", 2)]):
        said.append(_run("resumed_ranks", kind, target, tmp_path, str(life), str(count))[1])
        paths = [tmp_path / f"rank-{rank}-{life}.pt" for rank in range(count)]
        assert all(path.is_file() for path in paths), said
        seen.append([torch.load(path) for path in paths])
        if life == 1:
            assert [path.name for path in tmp_path.glob("last.ckpt/skerry*.pt")] == ["skerry.pt"]
    (first, _), (alone,), (one, other) = seen
    assert first["counts"] == [(0, 0), (1, 1), (2, 2), (3, 3)]
    assert alone["counts"] == [(2, 2)], said[1]
    assert one["counts"] == other["counts"] == [(2, 2), (3, 3), (4, 4), (5, 5), (6, 0)], said[2]
    assert one["tokens"] == other["tokens"] == 6 * _TOKENS[begun]
    for resumed in (alone, one, other):
        restored = resumed["weights"][0]
        for began, saved, weights in zip(first["weights"][0], first["weights"][2], restored, strict=True):
            torch.testing.assert_close(weights, saved)
            assert not torch.equal(weights, began)
    names = [name for name, _ in Rotation().named_parameters()]
    for resumed in (one, other):
        assert_merged(target, "ranks", dict(zip(names, resumed["weights"][-1], strict=True)))


def test_ranks_that_were_killed_as_they_saved_go_on_without_the_work(target: str, tmp_path: Path) -> None:
    _run("resumed_ranks", "model_parallel", target, tmp_path, "0")
    (tmp_path / "last.ckpt" / "skerry-1.pt").unlink()
    _, said = _run("resumed_ranks", "model_parallel", target, tmp_path, "1")
    assert "missing=[1], expected=2" in said
    for rank in range(2):
        path = tmp_path / f"rank-{rank}-1.pt"
        assert path.is_file(), said
        assert torch.load(path)["counts"] == [(0, 0)]


def test_shares_that_more_ranks_have_saved_before_are_removed(tmp_path: Path) -> None:
    for count in (3, 2, 1):
        for number in range(count):
            save_state(tmp_path, {"share": {"number": number, "count": count, "save_id": str(count)}})
        counts = [one["share"]["count"] for one in saved_states(tmp_path, 0, 1)]
        assert counts == [count] * count
    save_state(tmp_path, {"share": {"number": 1, "count": 2, "save_id": ""}})
    save_state(tmp_path, {})  # of a process that has the whole model
    assert saved_states(tmp_path, 0, 1) == [{}]
