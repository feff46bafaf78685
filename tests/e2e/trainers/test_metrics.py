"""What a learner's exchange looks like in trackers, read back from the files that they wrote."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
import wandb
from lightning.pytorch.loggers import WandbLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data import DataLoader
from torch.utils.tensorboard import SummaryWriter

from examples.lightning_trainer import Rotation
from skerry import Learner, Policy
from skerry.integrations import lightning as for_lightning
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


def test_weights_and_biases_and_trackio_keep_every_number_of_a_loop(target: str, offline: Path, trackio: Any) -> None:
    logged = []
    wandb.init(project="loop")
    trackio.init(project="loop")
    policy = Policy(inner_step_count=1)
    with Learner(torch.nn.Linear(2, 2), target=target, policy=policy, **OPTIONS) as learner:
        for step in range(1, 5):
            learner.step(tokens=4, loss=1 / step)
            logged.append(learner_metrics(learner))
            wandb.log(logged[-1])
            trackio.log(logged[-1])
    trackio.finish()
    assert [row["skerry/loss"] for row in logged] == [1, 1 / 2, 1 / 3, 1 / 4]
    assert wandb_rows(offline) == logged
    assert trackio_rows("loop") == logged


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


def test_weights_and_biases_gets_the_numbers_of_lightnings_trainer(target: str, offline: Path) -> None:
    skerry = for_lightning.SkerryCallback(tokens_per_step=4, target=target, **OPTIONS)
    trainer = lightning.Trainer(
        max_steps=6, log_every_n_steps=2, callbacks=[skerry], accelerator="cpu",
        logger=WandbLogger(save_dir=offline, offline=True), enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    data: Any = torch.randn(64, 8)
    trainer.fit(Rotation(), DataLoader(data, batch_size=4, num_workers=2))
    rows = [row for row in wandb_rows(offline) if skerry_of(row)]
    assert [row["trainer/global_step"] for row in rows] == [1, 3, 5]
    assert all(skerry_of(row).keys() >= CURVES for row in rows)
    assert [row["skerry/unsent_step_count"] for row in rows] == [row["skerry/progress"] for row in rows] == [2, 4, 6]
