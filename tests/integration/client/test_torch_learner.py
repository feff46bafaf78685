"""Learners of torch modules that are frozen, replaced or saved while they are attached."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from skerry import Learner, Policy, attach
from skerry.errors import StopExchangingError

POLICY = Policy(inner_step_count=2, lease_term_s=1.0)


def options(target: str) -> dict[str, Any]:
    return {"target": target, "run": "mine", "learner_id": "us", "create": True, "policy": POLICY}


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("is_stepped", [False, True])
def test_replaced_weights_are_neither_sent_nor_flushed(target: str, *, is_stepped: bool) -> None:
    model = nn.Linear(4, 4)
    learner = Learner(model, **options(target))

    def train() -> None:
        with learner:
            learner.step(tokens=1)
            model.load_state_dict(nn.Linear(4, 4).state_dict())
            if is_stepped:
                learner.step(tokens=1)

    with pytest.raises(StopExchangingError, match="a state dict was loaded") as caught:
        train()
    assert caught.value.reason == "WEIGHTS_REPLACED"
    assert learner.failure is caught.value
    assert learner.stats.deltas_acknowledged == 0


def test_what_is_frozen_after_attaching_can_be_trained_later(target: str) -> None:
    torch.manual_seed(0)
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    model = nn.Sequential(first, second)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(model, optimizer, tokens_per_step=1, **options(target)) as learner:
        first.requires_grad_(False)
        begun = first.weight.clone()
        for is_trainable in (False, True):
            first.requires_grad_(is_trainable)
            for _ in range(20):
                step(model, optimizer)
            assert learner.flush(20)
            assert torch.equal(begun, first.weight) != is_trainable
        assert learner.leave(60.0, load_merged=True)
    assert learner.stats.deltas_dropped == learner.stats.deltas_returned == 0
    assert not np.array_equal(learner.merged_weights()["0.weight"], begun.detach().numpy())


def test_the_default_type_and_device_of_the_process_do_not_matter(target: str) -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = nn.Sequential(nn.Linear(4, 64), nn.Linear(64, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with torch.device("meta"), attach(model, optimizer, tokens_per_step=1, **options(target)) as learner:
            with torch.device("cpu"):
                for _ in range(4):
                    step(model, optimizer)
            assert learner.flush(20)
    finally:
        torch.set_default_dtype(torch.float32)
    assert learner.stats.deltas_acknowledged > 0
    assert learner.failure is None


@pytest.mark.parametrize("has_left", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_saved_module_and_optimizer_load_without_skerry(target: str, tmp_path: Path, has_left: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    hooks = [dict(vars(module)) for module in model.modules()]
    optimizer = torch.optim.AdamW(model.parameters())
    with attach(model, optimizer, tokens_per_step=1, **options(target)) as learner:
        step(model, optimizer)
        if has_left:
            learner.leave()
            assert [dict(vars(module)) for module in model.modules()] == hooks
        torch.save((model, optimizer), tmp_path / "saved.pt")
    program = """
import sys, torch
sys.modules["skerry"] = None
model, optimizer = torch.load(sys.argv[1], weights_only=False)
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
model.load_state_dict(model.state_dict())
"""
    subprocess.run([sys.executable, "-c", program, tmp_path / "saved.pt"], check=True, timeout=120)
