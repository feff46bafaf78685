"""What a learner's exchange looks like in a tracker."""

from __future__ import annotations

from pathlib import Path

import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from skerry.client import Learner
from skerry.integrations.metrics import learner_metrics


def test_tensorboard_has_a_curve_of_every_number_that_is_known(target: str, tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    with (
        SummaryWriter(str(tmp_path)) as writer,
        Learner(model, target=target, run="fit", learner_id="us", create=True) as learner,
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
