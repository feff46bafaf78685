"""The inner optimizers that a learner may train with, and the one inner step that they all make."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from skerry.learner.batches import Batch
from skerry.learner.model import Gpt
from skerry.learner.settings import InnerOptimizerName, OptimizerSettings


class InnerOptimizer:
    """One optimizer, or several of which each has its own parameters, under one learning rate."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        """Steps `parts` together."""
        self._parts = tuple(parts)

    def step(self, rate: float) -> None:
        """Updates every parameter at learning rate `rate` and forgets the gradients."""
        for part in self._parts:
            for group in part.param_groups:
                group["lr"] = rate
            part.step()
            part.zero_grad()

    def zero_grad(self) -> None:
        """Forgets the gradients."""
        for part in self._parts:
            part.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` takes."""
        return {"parts": [part.state_dict() for part in self._parts]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from where `state_dict` was taken.

        Raises:
            ValueError: it is of other optimizers.
        """
        for part, content in zip(self._parts, state["parts"], strict=True):
            part.load_state_dict(content)


def make_optimizer(model: Gpt, settings: OptimizerSettings) -> InnerOptimizer:
    """The optimizer that `settings` name, over all of `model`'s parameters.

    `muon` orthogonalises the momentum of the blocks' matrices; embeddings and gains have no business there and stay
    with AdamW. Its updates are scaled to AdamW's size, so that one learning rate serves both.

    Source: Muon as in torch.optim.Muon; the scale is that of "Muon is Scalable for LLM Training" (arXiv 2502.16982).
    """
    named = list(model.named_parameters())
    vectors = [parameter for _, parameter in named if parameter.ndim <= 1]
    matrices = [parameter for _, parameter in named if parameter.ndim > 1]
    muon: list[torch.optim.Optimizer] = []
    if settings.name is InnerOptimizerName.MUON:
        hidden = [parameter for name, parameter in named if parameter.ndim > 1 and name.startswith("blocks.")]
        matrices = [parameter for name, parameter in named if parameter.ndim > 1 and not name.startswith("blocks.")]
        muon = [
            torch.optim.Muon(
                hidden,
                lr=settings.peak_rate,
                weight_decay=settings.weight_decay,
                adjust_lr_fn="match_rms_adamw",
            )
        ]
    groups = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": vectors, "weight_decay": 0.0},  # a norm's gain has no reason to shrink
    ]
    betas = (settings.beta1, settings.beta2)
    return InnerOptimizer([torch.optim.AdamW(groups, lr=settings.peak_rate, betas=betas, fused=True), *muon])


def inner_step(
    model: Gpt, optimizer: InnerOptimizer, batch: Batch, *, rate: float, norm_limit: float
) -> tuple[Tensor, Tensor]:
    """Trains `model` on one batch and returns (mean loss in nats a token, gradient norm before clipping), scalars.

    Where the norm isn't finite the weights stay as they are: one bad batch must not become everybody's weights.
    """
    with autocast(batch.tokens.device):
        loss = model.loss(batch.tokens, batch.targets)
    loss.backward()  # type: ignore[no-untyped-call]
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), norm_limit)
    if torch.isfinite(norm):
        optimizer.step(rate)
    else:
        optimizer.zero_grad()
    return loss.detach(), norm


def evaluate(model: Gpt, batches: Sequence[Batch]) -> float:
    """The mean loss over `batches`, in nats a token, each token weighing the same."""
    total = 0.0
    with torch.inference_mode(), autocast(next(model.parameters()).device):
        for batch in batches:
            total += float(model.loss(batch.tokens, batch.targets)) * batch.token_count
    return total / sum(batch.token_count for batch in batches)


def autocast(device: torch.device) -> AbstractContextManager[object]:
    """Compute in bfloat16 where the device does that faster, else in float32."""
    if device.type == "cuda" and torch.cuda.is_bf16_supported():
        return torch.autocast("cuda", dtype=torch.bfloat16)
    return nullcontext()
