"""LoRA adapters for the benchmark's model: a frozen model and small matrices beside each of its own.

Source: LoRA (arXiv 2106.09685): W + (alpha / r) B A with A random and B zero at first; alpha is 2 r here.
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

_SCALE: Final = 2.0  # alpha / r


class _LowRank(nn.Module):
    def __init__(self, weight: Tensor, rank: int) -> None:
        super().__init__()
        rows, columns = weight.shape
        self.a = nn.Parameter(nn.init.kaiming_uniform_(torch.empty(rank, columns), a=math.sqrt(5)))
        self.b = nn.Parameter(torch.zeros(rows, rank))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + _SCALE * self.b @ self.a


def add_adapters(model: nn.Module, rank: int) -> None:
    """Freezes the model and adds matrices of `rank` to its linear layers, drawn from torch's global generator."""
    model.requires_grad_(requires_grad=False)
    for layer in [module for module in model.modules() if isinstance(module, nn.Linear)]:
        parametrize.register_parametrization(layer, "weight", _LowRank(layer.weight, rank))
