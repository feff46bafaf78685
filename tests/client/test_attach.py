"""A learner that follows an optimizer, and what leaving a run does."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from skerry.client import ArrayLearner, Policy, attach
from skerry.client.errors import StopExchangingError
from tests.client.syncer_thread import syncer

POLICY = Policy(inner_step_count=2, lease_term_s=1.0)


def _made(target: str, learner_id: str = "us", **options: Any) -> dict[str, Any]:
    return {"target": target, "run": "mine", "learner_id": learner_id, "create": True, "policy": POLICY} | options


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_accumulated_batches_schedulers_and_skipped_steps_need_no_line_of_their_own(target: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = model(torch.ones(1, 4)).square().mean().item()

    with attach(model, optimizer, tokens_per_step=16, **_made(target)) as learner:
        for number in range(10):
            for _ in range(2):
                loss = model(torch.randn(8, 4)).square().mean() * (float("inf") if number == 3 else 1.0)
                scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            optimizer.zero_grad()

    assert (learner.stats.step_count, learner.stats.token_count) == (9, 9 * 16)
    assert learner.stats.deltas_acknowledged > 0
    assert learner.stats.unsent_step_count == 0
    assert model(torch.ones(1, 4)).square().mean().item() < before


def test_tokens_may_differ_from_step_to_step(target: str) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    counts = iter([5, 7])
    with attach(model, optimizer, tokens_per_step=lambda: next(counts), **_made(target)) as learner:
        _step(model, optimizer)
        _step(model, optimizer)
    assert learner.stats.token_count == 12


def test_an_optimizer_is_found_inside_its_wrappers(target: str) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped: Any = SimpleNamespace(optimizer=SimpleNamespace(optimizer=optimizer))
    with attach(model, wrapped, tokens_per_step=1, **_made(target)) as learner:
        _step(model, optimizer)
    assert learner.stats.step_count == 1


def test_an_optimizer_of_another_model_is_refused_before_anything_is_sent() -> None:
    optimizer = torch.optim.SGD(nn.Linear(4, 4).parameters(), lr=0.1)
    with pytest.raises(ValueError, match="trains none of the model's parameters"):
        attach(nn.Linear(4, 4), optimizer, tokens_per_step=1, target="127.0.0.1:9", run="mine")


def test_after_leaving_the_optimizer_is_free_for_another_learner(target: str) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = attach(model, optimizer, tokens_per_step=1, **_made(target))
    _step(model, optimizer)
    assert first.leave()
    assert not first.leave()
    with attach(model, optimizer, tokens_per_step=1, **_made(target)) as second:
        _step(model, optimizer)
    assert (first.stats.step_count, second.stats.step_count) == (1, 1)


@pytest.mark.parametrize("learner_id", ["us", "eu"])
def test_attaching_again_has_the_models_earlier_learner_leave(target: str, learner_id: str) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = attach(model, optimizer, tokens_per_step=1, **_made(target))
    _step(model, optimizer)
    with attach(model, optimizer, tokens_per_step=1, **_made(target, learner_id)) as second:
        assert first.stats.unsent_step_count == 0
        _step(model, optimizer)
    assert (first.stats.step_count, second.stats.step_count) == (1, 1)
    assert second.failure is None


def test_attaching_again_after_loading_a_checkpoint_needs_no_leaving(target: str) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attach(model, optimizer, tokens_per_step=1, **_made(target))
    model.load_state_dict(nn.Linear(4, 4).state_dict())
    with attach(model, optimizer, tokens_per_step=1, **_made(target)) as second:
        _step(model, optimizer)
    assert second.stats.unsent_step_count == 0


def test_weights_that_are_replaced_end_the_loop_at_the_next_step(target: str) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    learner = attach(model, optimizer, tokens_per_step=1, **_made(target))
    model.load_state_dict(nn.Linear(4, 4).state_dict())
    with pytest.raises(StopExchangingError):
        _step(model, optimizer)
    learner.close()


def test_leaving_can_end_with_the_runs_weights_bit_for_bit(target: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    learner = attach(model, optimizer, tokens_per_step=1, **_made(target))
    for _ in range(5):
        _step(model, optimizer)
    own = model.weight.detach().clone()
    assert learner.leave(60.0, load_merged=True)
    assert learner.stats.deltas_merged == learner.stats.deltas_acknowledged > 0
    assert not torch.equal(own, model.weight)  # 4 bits have rounded it, and the outer step has moved it

    merged = learner.merged_weights()
    arrays = {name: np.zeros_like(values) for name, values in merged.items()}
    with ArrayLearner(arrays, target=target, run="mine", learner_id="eu"):
        pass
    for name, tensor in model.state_dict().items():
        assert np.array_equal(tensor.numpy(), arrays[name])
        assert np.array_equal(merged[name], arrays[name])


def test_work_that_was_not_merged_stays_in_the_model() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with syncer() as target:
        learner = attach(model, optimizer, tokens_per_step=1, **_made(target))
    _step(model, optimizer)
    own = model.weight.detach().clone()
    assert not learner.leave(0.2, load_merged=True)
    assert torch.equal(own, model.weight)
    assert not np.array_equal(learner.merged_weights()["weight"], own.numpy())


def test_a_stopped_learner_keeps_its_own_weights(target: str) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    learner = attach(model, optimizer, tokens_per_step=1, **_made(target))
    with ArrayLearner(learner.merged_weights(), target=target, run="mine", learner_id="us"):  # fences the first one
        while learner.failure is None:
            _step(model, optimizer)
        own = model.weight.detach().clone()
        assert not learner.leave(1.0, load_merged=True)
    assert torch.equal(own, model.weight)


FORGETFUL = """
import sys, torch
from skerry.client import attach
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
learner = attach(model, optimizer, tokens_per_step=1, target=sys.argv[1], run="mine", learner_id="us", create=True)
optimizer.step()
if sys.argv[2] == "leave":
    learner.leave()
"""


@pytest.mark.parametrize("ending", ["leave", "forget"])
def test_a_process_that_forgets_to_leave_is_told_what_it_lost(target: str, ending: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORGETFUL, target, ending], capture_output=True, text=True, check=True, timeout=120
    )
    is_told = "the process ends with steps" in done.stderr and "steps=1" in done.stderr
    assert is_told == (ending == "forget"), done.stdout + done.stderr
