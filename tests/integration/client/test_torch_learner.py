"""Learners of torch modules: a stranger's in a ten-line loop, and others that are frozen, replaced or saved."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from skerry import ArrayLearner, Learner, Policy, attach
from skerry.errors import StopExchangingError


class StrangersModel(nn.Module):
    """Not ours: an embedding tied to its head, a convolution, a norm, and something frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(32, 8)
        self.mix = nn.Conv1d(8, 8, 3, padding=1)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 32, bias=False)
        self.head.weight = self.tokens.weight
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.tokens(tokens)
        hidden = hidden + self.mix(hidden.transpose(1, 2)).transpose(1, 2)
        return self.head(self.norm(hidden))  # type: ignore[no-any-return]


def test_a_strangers_module_trains_in_ten_lines(target: str) -> None:
    torch.manual_seed(0)
    model = StrangersModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    policy = Policy(inner_step_count=4, lease_term_s=1.0)
    losses: list[float] = []

    with Learner(model, target=target, run="theirs", learner_id="home", create=True, policy=policy) as learner:
        while min(learner.stats.versions.values()) < 4:
            tokens = torch.randint(0, 32, (4, 16))
            loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            learner.step(tokens=tokens.numel(), loss=loss.item())
            losses.append(loss.item())
            assert len(losses) < 20_000

    assert np.mean(losses[-5:]) < losses[0]
    assert learner.failure is None
    assert learner.stats.deltas_merged > 0


def test_a_learner_whose_weights_share_memory_follows_the_run(target: str) -> None:
    torch.manual_seed(0)
    layers = [[nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)] for _ in range(2)]
    for first, second in layers:
        first.weight.data = second.weight.data
    models = [nn.Sequential(*pair) for pair in layers]
    options: dict[str, Any] = {"target": target, "run": "tied", "create": True}
    policy = Policy(inner_step_count=2, lease_term_s=1.0)
    trained, follower = (
        Learner(model, learner_id=name, policy=policy, **options)
        for name, model in zip(("us", "them"), models, strict=True)
    )
    while follower.stats.versions["fragment-00"] < 6:
        with torch.no_grad():
            layers[0][0].weight.sub_(0.01)
        trained.step(1)
        follower.step(1)
    followed = layers[1][1].weight.detach().numpy()
    np.testing.assert_allclose(followed, follower.merged_weights()["0.weight"], atol=1e-6)
    trained.close()
    follower.close()


def test_a_module_is_refused_as_arrays_with_what_to_use_instead(target: str) -> None:
    module: Any = nn.Linear(2, 2)
    with pytest.raises(TypeError, match=r"a torch module is for Learner\. type=Linear"):
        ArrayLearner(module, target=target, run="fit", learner_id="us")


@pytest.mark.parametrize("is_stepped", [False, True])
def test_replaced_weights_are_neither_sent_nor_flushed(target: str, *, is_stepped: bool) -> None:
    model = nn.Linear(4, 4)
    options: dict[str, Any] = {"target": target, "run": "mine", "learner_id": "us", "create": True}
    learner = Learner(model, policy=Policy(inner_step_count=2), **options)

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
    policy = Policy(inner_step_count=2, lease_term_s=1.0)
    with attach(
        model, optimizer, tokens_per_step=1, target=target, run="m", learner_id="us", create=True, policy=policy
    ) as learner:
        first.requires_grad_(False)
        begun = first.weight.clone()
        for is_trainable in (False, True):
            first.requires_grad_(is_trainable)
            for _ in range(20):
                model(torch.randn(8, 4)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            assert learner.flush(20)
            assert torch.equal(begun, first.weight) != is_trainable
        assert learner.leave(60.0, load_merged=True)
    assert learner.stats.deltas_dropped == learner.stats.deltas_returned == 0
    assert not np.array_equal(learner.merged_weights()["0.weight"], begun.detach().numpy())


def test_the_default_type_and_device_of_the_process_do_not_matter(target: str) -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        policy = Policy(inner_step_count=2)
        attaching = partial(attach, model, optimizer, tokens_per_step=1, target=target, run="mine", learner_id="us")
        with torch.device("meta"), attaching(create=True, policy=policy) as learner:
            with torch.device("cpu"):
                for _ in range(4):
                    model(torch.randn(8, 64)).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
            assert learner.flush(20)
    finally:
        torch.set_default_dtype(torch.float32)
    assert learner.stats.deltas_acknowledged > 0
    assert learner.failure is None


@pytest.mark.parametrize("has_left", [False, True])
def test_a_saved_module_and_optimizer_load_without_skerry(target: str, tmp_path: Path, has_left: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    hooks = [dict(vars(one)) for one in model.modules()]
    optimizer = torch.optim.AdamW(model.parameters())
    with attach(model, optimizer, tokens_per_step=1, target=target, run="m", learner_id="us", create=True) as learner:
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        if has_left:
            learner.leave()
            assert [dict(vars(one)) for one in model.modules()] == hooks
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
