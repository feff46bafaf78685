"""The frozen task: one model, one corpus, one batch size, one way to judge. Nothing here varies between arms.

A GPT of 33 thousand parameters on the bytes of Python's standard library, split by file; a step of one learner is 8
windows of 64 bytes. Small enough that thousands of steps of many learners with several seeds fit two processor cores.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from benchmarks.quality.lora import add_adapters
from skerry_learner.batches import Batch, BatchSampler, held_out_batches
from skerry_learner.corpus import Corpus, load_corpus
from skerry_learner.inner_training import InnerOptimizer, evaluate, inner_step, make_optimizer
from skerry_learner.model import Gpt
from skerry_learner.schedule import learning_rate
from skerry_learner.settings import MODEL_CONFIGS

MODEL: Final = MODEL_CONFIGS["nano"]
BATCH_SIZE: Final = 8
# 3200 windows of 64 predictions: 204 800 validation tokens.
HELD_OUT_WINDOWS: Final = 3200
WARMUP_STEPS: Final = 50
_EVALUATION_BATCH: Final = 64

BASE_STEPS: Final = 800
BASE_RATE: Final = 1.2e-2
"""How the model that adapters are added to was trained, on `PYTHON` in batches of 16 windows."""

PYTHON: Final = "python"
"""The standard library's source text: what everybody trains and is judged on unless an arm says otherwise."""
CPP: Final = "c++"
"""The C++ headers that torch brings along: another kind of text, for a learner whose data differ."""


@dataclass(frozen=True)
class Inner:
    """One learner's inner training, but for its data."""

    peak_rate: float
    step_count: int  # of the learning rate's schedule
    optimizer: str = "adamw"
    rank: int = 0  # of the adapters that are trained on a trained model; 0: the whole model is, from scratch


class InnerTraining:
    """A model and what takes a step of it."""

    def __init__(self, inner: Inner, *, seed: int) -> None:
        """Draws the initial weights from `seed`."""
        self._name = inner.optimizer
        torch.manual_seed(seed)
        self.model = Gpt(MODEL)
        if inner.rank:
            self.model.load_state_dict(_base(seed))
            torch.manual_seed(seed)
            add_adapters(self.model, inner.rank)
        self._peak_rate = inner.peak_rate
        self._step_count = inner.step_count
        self.forget()

    def forget(self) -> None:
        """Starts the inner optimizer anew, as a process without a checkpoint does."""
        self._optimizer: InnerOptimizer = make_optimizer(self.model, self._name)

    def scale_rate(self, factor: float) -> None:
        """Makes every rate of the schedule `factor` times as high."""
        self._peak_rate *= factor

    def step(self, batch: Batch, position: float) -> float:
        """Takes one step, `position` steps into the learning rate's schedule, and returns the batch's loss."""
        rate = learning_rate(position, peak=self._peak_rate, warmup_steps=WARMUP_STEPS, horizon_steps=self._step_count)
        loss, _ = inner_step(self.model, self._optimizer, batch, rate=rate)
        return float(loss)

    def judge(self, data: str = PYTHON) -> float:
        """The loss on held-out text, in nats a byte."""
        return evaluate(self.model, _held_out(data))


def sampler(
    shard: int, shard_count: int, *, seed: int, data: str = PYTHON, batch_size: int = BATCH_SIZE
) -> BatchSampler:
    """The batches of the learner that trains on part `shard` (from 1) of `shard_count`."""
    tokens = _corpus(data, (shard, shard_count)).train
    return BatchSampler(tokens, MODEL, batch_size=batch_size, seed=seed, learner=f"learner-{shard}")


def joined(batches: list[Batch]) -> Batch:
    """One batch of all their rows."""
    return Batch(torch.cat([one.tokens for one in batches]), torch.cat([one.targets for one in batches]))


@lru_cache
def _base(seed: int) -> dict[str, Tensor]:
    """The weights of a model that was trained on Python, the same for every arm under one seed."""
    training = InnerTraining(Inner(BASE_RATE, BASE_STEPS), seed=seed)
    batches = sampler(1, 1, seed=seed, batch_size=2 * BATCH_SIZE)
    for step in range(BASE_STEPS):
        training.step(batches.batch(step), step)
    return training.model.state_dict()


@lru_cache
def _corpus(data: str, shard: tuple[int, int] = (1, 1)) -> Corpus:
    return load_corpus(None if data == PYTHON else Path(torch.__file__).parent / "include" / "ATen", shard=shard)


@lru_cache
def _held_out(data: str) -> list[Batch]:
    return held_out_batches(_corpus(data).held_out, MODEL, batch_size=_EVALUATION_BATCH, window_count=HELD_OUT_WINDOWS)
