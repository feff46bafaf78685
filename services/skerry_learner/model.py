"""A small GPT in plain PyTorch."""

from __future__ import annotations

from typing import Final, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from skerry_learner.settings import ModelConfig

_ROTARY_BASE: Final = 10_000.0
_INITIAL_STD: Final = 0.02


class Gpt(nn.Module):
    """A decoder-only transformer: rotary positions, RMS norms before each half of a block, no biases, no dropout.

    The parameters' names are the names of the run's tensors. The output is tied to the embedding.
    """

    def __init__(self, config: ModelConfig) -> None:
        """Draw the initial weights from torch's global generator."""
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(_Block(config) for _ in range(config.layer_count))
        self.norm = nn.RMSNorm(config.width)
        self._initialise()
        cosine, sine = _rotary_tables(config.context, config.width // config.head_count)
        self.register_buffer("rotary_cosine", cosine, persistent=False)
        self.register_buffer("rotary_sine", sine, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of shape (batch, length, vocabulary) for ids of shape (batch, length <= config.context), int64."""
        length = tokens.shape[1]
        cosine = cast("Tensor", self.rotary_cosine)[:length]  # (length, head width / 2)
        sine = cast("Tensor", self.rotary_sine)[:length]  # (length, head width / 2)
        hidden = self.embedding(tokens)  # (batch, length, width)
        for block in self.blocks:
            hidden = block(hidden, cosine, sine)
        return functional.linear(self.norm(hidden), self.embedding.weight)

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean cross-entropy in nats a token, a scalar in float32, for ids of shape (batch, length)."""
        logits = self(tokens).float()
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    @property
    def parameter_count(self) -> int:
        """The number of trained parameters."""
        return sum(parameter.numel() for parameter in self.parameters())

    def _initialise(self) -> None:
        # Projections into the residual stream are scaled down, so that its variance does not grow with depth.
        residual_std = _INITIAL_STD / (2 * self.config.layer_count) ** 0.5
        for name, parameter in self.named_parameters():
            if parameter.ndim < 2:
                continue
            is_residual = name.endswith(("attention_out.weight", "feed_out.weight"))
            nn.init.normal_(parameter, std=residual_std if is_residual else _INITIAL_STD)


class _Block(nn.Module):
    """One layer: causal self-attention and a feed-forward network, each added to the residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.width
        self.head_count = config.head_count
        self.attention_norm = nn.RMSNorm(width)
        self.attention_in = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.feed_norm = nn.RMSNorm(width)
        self.feed_in = nn.Linear(width, 4 * width, bias=False)
        self.feed_out = nn.Linear(4 * width, width, bias=False)

    def forward(self, hidden: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        projected = self.attention_in(self.attention_norm(hidden))
        heads = projected.view(batch, length, 3, self.head_count, width // self.head_count).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind(0)  # each (batch, heads, length, head width)
        query, key = _rotated(query, cosine, sine), _rotated(key, cosine, sine)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.attention_out(attended.transpose(1, 2).reshape(batch, length, width))
        fed = functional.gelu(self.feed_in(self.feed_norm(hidden)), approximate="tanh")
        return hidden + cast("Tensor", self.feed_out(fed))


def _rotary_tables(context: int, head_width: int) -> tuple[Tensor, Tensor]:
    frequencies = _ROTARY_BASE ** (-torch.arange(0, head_width, 2, dtype=torch.float32) / head_width)
    angles = torch.outer(torch.arange(context, dtype=torch.float32), frequencies)  # (context, head width / 2)
    return angles.cos(), angles.sin()


def _rotated(vectors: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = vectors.chunk(2, dim=-1)
    rotated = torch.cat((first * cosine - second * sine, first * sine + second * cosine), dim=-1)
    return rotated.to(vectors.dtype)
