"""The table of adapters is the measured one, and its arms train adapters and nothing else."""

from __future__ import annotations

import pytest
import torch

from benchmarks.quality import task
from benchmarks.quality.adapters import ALONE_RATE, COMMITTED, RANK, Cell, jobs
from benchmarks.quality.arms import Islands
from benchmarks.quality.jobs import Outcomes
from benchmarks.quality.lora import add_adapters
from benchmarks.quality.world import train_islands
from skerry.model.torch.parameters import TorchParameters
from skerry_learner.model import Gpt


def test_the_committed_outcomes_fill_the_whole_table() -> None:
    outcomes = Outcomes(COMMITTED)
    assert not [job for job in jobs() if job not in outcomes]


def test_adapters_change_nothing_at_first_and_are_all_that_is_exchanged() -> None:
    torch.manual_seed(0)
    model = Gpt(task.MODEL)
    tokens = torch.arange(32)[None]
    before = model(tokens)
    add_adapters(model, RANK)
    torch.testing.assert_close(model(tokens), before, rtol=0.0, atol=0.0)
    numel = sum(tensor.numel for tensor in TorchParameters(model).tensors)
    assert numel == task.MODEL.layer_count * RANK * 16 * task.MODEL.width


@pytest.mark.long
def test_islands_train_adapters_beside_a_model_that_stays() -> None:
    arm = Cell(2, inner_step_count=8, step_count=24).adapters({})
    assert isinstance(arm, Islands)
    trained = task.InnerTraining(task.Inner(ALONE_RATE, arm.step_count, rank=RANK), seed=0).judge(task.CPP)
    assert train_islands(arm, 0).losses[task.CPP] < trained - 0.1
