"""The inner optimizers: each learns, resumes, and leaves the weights alone when a gradient is no number."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from skerry_learner.batches import Batch
from skerry_learner.inner_training import InnerOptimizer, inner_step, make_optimizer
from skerry_learner.model import Gpt
from skerry_learner.settings import MODEL_CONFIGS

BOTH = pytest.mark.parametrize("name", ["adamw", "muon"])


def made(name: str) -> tuple[Gpt, InnerOptimizer]:
    torch.manual_seed(0)
    model = Gpt(MODEL_CONFIGS["nano"])
    return model, make_optimizer(model, name)


def batch() -> Batch:
    tokens = torch.arange(128).reshape(2, 64)
    return Batch(tokens, tokens + 1)


def losses(model: Gpt, optimizer: InnerOptimizer, count: int) -> list[float]:
    steps = [inner_step(model, optimizer, batch(), rate=1e-2) for _ in range(count)]
    return [float(loss) for loss, _ in steps]


@BOTH
def test_the_loss_falls_and_every_parameter_is_trained(name: str) -> None:
    model, optimizer = made(name)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    course = losses(model, optimizer, 30)
    assert course[0] == pytest.approx(math.log(256), abs=0.2)
    assert course[-1] < 0.5 * course[0]
    assert not [key for key, tensor in model.named_parameters() if torch.equal(tensor, before[key])]


@BOTH
def test_a_resumed_optimizer_goes_on_bit_for_bit(name: str) -> None:
    model, optimizer = made(name)
    losses(model, optimizer, 3)
    other, resumed = made(name)
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # torch shares the tensors
    assert losses(other, resumed, 3) == losses(model, optimizer, 3)


@BOTH
def test_a_gradient_that_is_no_number_changes_nothing(name: str) -> None:
    model, optimizer = made(name)
    with torch.no_grad():
        model.norm.weight[0] = math.inf
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    _, norm = inner_step(model, optimizer, batch(), rate=1e-2)
    assert not torch.isfinite(norm)
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())
