"""The inner optimizers of a learner, and the inner step."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch
from torch import Tensor, nn

from skerry_learner.batches import Batch
from skerry_learner.model import Gpt

_NORM_LIMIT: Final = 1.0  # of the gradient


class InnerOptimizer:
    """One or more torch optimizers, each with its own parameters, with a common learning rate."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self._parts = tuple(parts)

    def step(self, rate: float) -> None:
        """Updates every parameter at learning rate `rate`."""
        for part in self._parts:
            for group in part.param_groups:
                group["lr"] = rate
            part.step()

    def state_dict(self) -> list[dict[str, Any]]:
        """Returns the state for `load_state_dict`."""
        return [part.state_dict() for part in self._parts]

    def load_state_dict(self, states: Sequence[dict[str, Any]]) -> None:
        """Restores the state that `state_dict` returned.

        Raises:
            ValueError: it belongs to other optimizers.
        """
        for part, state in zip(self._parts, states, strict=True):
            part.load_state_dict(state)


def make_optimizer(
    model: nn.Module, name: str = "adamw", *, weight_decay: float = 0.1, betas: tuple[float, float] = (0.9, 0.95)
) -> InnerOptimizer:
    """The optimizer `adamw` or `muon` for all of `model`'s parameters.

    `muon` orthogonalises the momentum of the blocks' matrices. Embeddings and norm gains are trained with AdamW. Muon's
    updates are scaled to AdamW's size, so both use the same learning rate.

    Source: Muon as in torch.optim.Muon; the scale is that of "Muon is Scalable for LLM Training" (arXiv 2502.16982).
    """
    parameters = dict(model.named_parameters())
    muon: list[torch.optim.Optimizer] = []
    if name == "muon":
        hidden = [name for name, value in parameters.items() if value.ndim > 1 and name.startswith("blocks.")]
        muon = [
            torch.optim.Muon(
                [parameters.pop(name) for name in hidden],
                weight_decay=weight_decay,
                adjust_lr_fn="match_rms_adamw",
            )
        ]
    groups = [
        {"params": [value for value in parameters.values() if value.ndim > 1], "weight_decay": weight_decay},
        {"params": [value for value in parameters.values() if value.ndim <= 1], "weight_decay": 0.0},  # gains of norms
    ]
    return InnerOptimizer([torch.optim.AdamW(groups, betas=betas, fused=True), *muon])


def inner_step(model: Gpt, optimizer: InnerOptimizer, batch: Batch, *, rate: float) -> tuple[Tensor, Tensor]:
    """Trains `model` on one batch and returns (mean loss in nats a token, gradient norm before clipping), both scalars.

    If the norm is not finite the weights are not changed, because the run would merge the bad values.
    """
    with autocast(batch.tokens.device):
        loss = model.loss(batch.tokens, batch.targets)
    loss.backward()  # type: ignore[no-untyped-call]
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), _NORM_LIMIT)
    if torch.isfinite(norm):
        optimizer.step(rate)
    model.zero_grad()
    return loss.detach(), norm


def evaluate(model: Gpt, batches: Sequence[Batch]) -> float:
    """The mean loss of all tokens of `batches`, in nats a token."""
    total = 0.0
    with torch.inference_mode(), autocast(next(model.parameters()).device):
        for batch in batches:
            total += float(model.loss(batch.tokens, batch.targets)) * batch.token_count
    return total / sum(batch.token_count for batch in batches)


def autocast(device: torch.device) -> AbstractContextManager[object]:
    """A context that computes in bfloat16 on CUDA devices that support it, and in float32 elsewhere."""
    if device.type == "cuda" and torch.cuda.is_bf16_supported():
        return torch.autocast("cuda", dtype=torch.bfloat16)
    return nullcontext()
