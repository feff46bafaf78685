"""What a learner's exchange looks like in trackers, read back from the files that they wrote."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import wandb
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from skerry import Learner
from skerry.integrations import transformers as for_transformers
from skerry.integrations.metrics import learner_metrics
from tests.e2e.trainers.hugging_face import trainer_of
from tests.e2e.trainers.trackers import trackio_rows, wandb_rows

OPTIONS: dict[str, Any] = {"run": "fit", "learner_id": "us", "create": True}
CURVES = {f"skerry/{name}" for name in ("version", "deltas_merged", "unsent_step_count", "is_exchanging", "bytes_up")}


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder to which Weights & Biases writes, with its process that does so."""
    settings = {"MODE": "offline", "ERROR_REPORTING": "false", "SILENT": "true", "CONSOLE": "off"}
    folders = dict.fromkeys(("DIR", "CACHE_DIR", "CONFIG_DIR", "DATA_DIR"), str(tmp_path))
    for name, value in (settings | folders).items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    yield tmp_path
    wandb.finish()
    wandb.teardown()


@pytest.fixture(scope="session")
def trackio(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The library, which reads once where to write to."""
    assert "trackio" not in sys.modules
    os.environ["TRACKIO_DIR"] = str(tmp_path_factory.mktemp("trackio"))
    import trackio

    return trackio


def skerry_of(row: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns Skerry's numbers of a row."""
    return {name.removeprefix(prefix): value for name, value in row.items() if name.startswith(f"{prefix}skerry/")}


def test_tensorboard_has_a_curve_of_every_number_that_is_known(target: str, tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    with (
        SummaryWriter(str(tmp_path)) as writer,
        Learner(model, target=target, **OPTIONS) as learner,
    ):
        assert "skerry/loss" not in learner_metrics(learner)
        for step in (1, 2, 3):
            learner.step(tokens=4, loss=1 / step)
            for name, value in learner_metrics(learner).items():
                writer.add_scalar(name, value, step)
    board = EventAccumulator(str(tmp_path)).Reload()
    losses = board.Scalars("skerry/loss")
    assert [(one.step, one.value) for one in losses] == [(step, torch.tensor(1 / step).item()) for step in (1, 2, 3)]
    known = {f"skerry/{name}" for name in ("progress", "step_time_s", "unsent_step_count", "version")}
    assert known <= set(board.Tags()["scalars"])


def test_both_get_the_numbers_of_hugging_faces_trainer(target: str, offline: Path, trackio: Any) -> None:
    skerry = for_transformers.SkerryCallback(target=target, **OPTIONS)
    trainer = trainer_of(
        offline / "out", skerry, save_strategy="no", report_to=["wandb", "trackio"], project="trainer", run_name="us"
    )
    trainer.train()
    # The trainer's log of the last step comes after the learner has left.
    wanted = [skerry_of(entry) for entry in trainer.state.log_history[:5]]
    assert all(entry.keys() >= CURVES for entry in wanted)
    assert [entry["skerry/unsent_step_count"] for entry in wanted] == [1, 2, 3, 4, 5]
    for rows in (wandb_rows(offline), trackio_rows("trainer")):
        assert [skerry_of(one, "train/") for one in rows[:5]] == wanted
        assert [one["train/global_step"] for one in rows[:5]] == [1, 2, 3, 4, 5]
