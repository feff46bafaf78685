"""A model of which most is frozen, as adapters have it."""

from __future__ import annotations

import torch
from torch import nn


class Adapted(nn.Module):
    """A frozen base of two kinds, an adapter that is trained, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Linear(3, 2).requires_grad_(False)
        self.packed = nn.Parameter(torch.arange(5, dtype=torch.uint8), requires_grad=False)
        self.adapter = nn.Linear(3, 2)
        self.norm = nn.BatchNorm1d(2, affine=False)
        self.register_buffer("mask", torch.ones(2), persistent=False)


FROZEN = {"base.weight", "base.bias", "packed"}
BUFFERS = {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
