"""Which tokens a step trains on: a pure function of seed, learner and step."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from skerry_learner.corpus import Tokens
from skerry_learner.errors import LearnerInputError
from skerry_learner.settings import ModelConfig

_WINDOW_STREAM: Final = 0
_OFFSET_STREAM: Final = 1


@dataclass(frozen=True)
class Batch:
    """Token ids and, for each, the one that follows it; both (batch, context), int64."""

    tokens: Tensor
    targets: Tensor

    def to(self, device: torch.device) -> Batch:
        """The same batch on `device`."""
        return Batch(self.tokens.to(device), self.targets.to(device))

    @property
    def token_count(self) -> int:
        """Tokens that a step on this batch is trained on."""
        return self.tokens.numel()


class BatchSampler:
    """Windows of a learner's tokens in random order, each window once an epoch.

    An epoch cuts the tokens into windows of `context + 1` from a random offset and goes through them in random order,
    both drawn from (seed, learner, epoch) alone.
    """

    def __init__(self, tokens: Tokens, model: ModelConfig, *, batch_size: int, seed: int, learner: str) -> None:
        """Sample from `tokens` for a model of this shape.

        Raises:
            LearnerInputError: there are too few tokens for one batch.
        """
        self._window = model.context + 1
        # One window fewer than fits, so that every offset leaves room for them all.
        self._window_count = len(tokens) // self._window - 1
        if self._window_count < batch_size:
            raise LearnerInputError(
                f"too few tokens for one batch. tokens={len(tokens)}, batch={batch_size}, context={model.context}. "
                f"Use more --data, fewer shards, or a smaller --batch"
            )
        self._tokens = tokens
        self._batch_size = batch_size
        self._vocabulary = model.vocabulary
        self._entropy = (seed, zlib.crc32(learner.encode()))
        self._epoch = -1
        self._offset = 0
        self._order = np.empty(0, dtype=np.int64)  # (window count,)

    def batch(self, step: int) -> Batch:
        """The batch of the step that follows `step` done ones.

        Raises:
            LearnerInputError: a token is outside the vocabulary.
        """
        first = step * self._batch_size
        windows = [self._window_at(number) for number in range(first, first + self._batch_size)]
        return _as_batch(windows, self._vocabulary)

    def _window_at(self, number: int) -> Tokens:
        epoch, position = divmod(number, self._window_count)
        if epoch != self._epoch:
            self._epoch = epoch
            self._offset = int(self._generator(epoch, _OFFSET_STREAM).integers(self._window))
            self._order = self._generator(epoch, _WINDOW_STREAM).permutation(self._window_count)
        start = self._offset + int(self._order[position]) * self._window
        return self._tokens[start : start + self._window]

    def _generator(self, epoch: int, stream: int) -> np.random.Generator:
        return np.random.Generator(np.random.Philox(np.random.SeedSequence((*self._entropy, epoch, stream))))


def held_out_batches(tokens: Tokens, model: ModelConfig, *, batch_size: int, window_count: int) -> list[Batch]:
    """Windows for a model of this shape, spread evenly over the held-out tokens; the same for every learner.

    There are `window_count` windows, or as many as fit without overlap. The last batch may be smaller.

    Raises:
        LearnerInputError: there are fewer tokens than one window, or a token is outside the vocabulary.
    """
    window = model.context + 1
    count = min(window_count, len(tokens) // window)
    if count == 0:
        raise LearnerInputError(
            f"too few held-out tokens. tokens={len(tokens)}, context={model.context}. "
            "Use more --data or a smaller --context"
        )
    starts = [(len(tokens) - window) * number // max(count - 1, 1) for number in range(count)]
    windows = [tokens[start : start + window] for start in starts]
    return [_as_batch(windows[first : first + batch_size], model.vocabulary) for first in range(0, count, batch_size)]


def _as_batch(windows: list[Tokens], vocabulary: int) -> Batch:
    stacked = np.stack(windows).astype(np.int64)  # (batch, context + 1)
    largest = int(stacked.max())
    if largest >= vocabulary:
        raise LearnerInputError(
            f"the data has a token outside the model's vocabulary. token={largest}, vocabulary={vocabulary}. "
            f"Raise --vocabulary"
        )
    tokens = torch.from_numpy(stacked)
    return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
