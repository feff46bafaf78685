"""Tasks: what is trained on which text, by which recipe, and how it is judged. Nothing here varies between arms.

`BYTES` is a GPT of 33 thousand parameters on the bytes of Python's standard library, split by file; a step of one
learner is 8 windows of 64 bytes. Thousands of steps of many learners with several seeds fit two processor cores.
The others are nanoGPT's, on the characters of a text (`benchmarks.quality.nanogpt`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from benchmarks.quality.lora import add_adapters
from benchmarks.quality.nanogpt import SIZES, TEXT_VARIABLE, NanoGpt, load_characters
from skerry_learner.batches import Batch, BatchSampler, held_out_batches
from skerry_learner.corpus import Corpus, load_corpus
from skerry_learner.inner_training import InnerOptimizer, evaluate, inner_step, make_optimizer
from skerry_learner.model import Gpt
from skerry_learner.schedule import learning_rate
from skerry_learner.settings import MODEL_CONFIGS, ModelConfig

PYTHON: Final = "python"
"""The standard library's source text: what everybody trains and is judged on unless an arm says otherwise."""
CPP: Final = "c++"
"""The C++ headers that torch brings along: another kind of text, for a learner whose data differ."""

BASE_STEPS: Final = 800
BASE_RATE: Final = 1.2e-2
"""How the model that adapters are added to was trained, on `PYTHON` in batches of 16 windows."""

_EVALUATION_BATCH: Final = 64


@dataclass(frozen=True)
class Task:
    """A model, its text and the recipe that trains it."""

    config: ModelConfig
    make_model: Callable[[ModelConfig], Any]  # what has `loss`, as `Gpt`
    load: Callable[[str, tuple[int, int]], Corpus]  # the text of this name, with (i, n) the i-th of n parts of it
    batch_size: int  # windows in a step of one learner
    warmup_steps: int
    betas: tuple[float, float]
    held_out_windows: int


def _load_files(data: str, shard: tuple[int, int]) -> Corpus:
    return load_corpus(None if data == PYTHON else Path(torch.__file__).parent / "include" / "ATen", shard=shard)


def _load_text(_: str, shard: tuple[int, int]) -> Corpus:
    return load_corpus(Path(os.environ[TEXT_VARIABLE]), shard=shard)


BYTES: Final = "bytes"
GPU: Final = "gpu"
DEVICE_VARIABLE: Final = "SKERRY_BENCHMARK_DEVICE"
"""The environment's name for the device that models are trained on, the CPU by default."""
_TASKS: Final = {
    # 3200 windows of 64 predictions: 204 800 validation tokens.
    BYTES: Task(MODEL_CONFIGS["nano"], Gpt, _load_files, 8, 50, (0.9, 0.95), 3200),
    # 4.8M parameters on the bytes of a text; 2048 windows of 256 predictions.
    GPU: Task(MODEL_CONFIGS["mini"], Gpt, _load_text, 64, 100, (0.9, 0.95), 2048),
    # The published recipe for a processor: github.com/karpathy/nanoGPT, README and config/train_shakespeare_char.py.
    **{name: Task(config, NanoGpt, load_characters, 12, 100, (0.9, 0.99), 10**6) for name, config in SIZES.items()},
}


def task_of(name: str) -> Task:
    """Returns the task of this name."""
    return _TASKS[name]


@dataclass(frozen=True)
class Inner:
    """One learner's inner training, but for its data."""

    peak_rate: float
    step_count: float  # of the learning rate's schedule
    optimizer: str = "adamw"
    rank: int = 0  # of the adapters that are trained on a trained model; 0: the whole model is, from scratch
    task: str = BYTES


class InnerTraining:
    """A model and what takes a step of it."""

    def __init__(self, inner: Inner, *, seed: int) -> None:
        """Draws the initial weights from `seed`."""
        self._name, self._inner, self._task = inner.optimizer, inner, task_of(inner.task)
        torch.manual_seed(seed)
        self.model = self._task.make_model(self._task.config)
        if inner.rank:
            self.model.load_state_dict(_base(seed))
            torch.manual_seed(seed)
            add_adapters(self.model, inner.rank)
        self._device = torch.device(os.environ.get(DEVICE_VARIABLE, "cpu"))
        self.model.to(self._device)
        self._peak_rate = inner.peak_rate
        self.forget()

    def forget(self) -> None:
        """Starts the inner optimizer anew, as a process without a checkpoint does."""
        self._optimizer: InnerOptimizer = make_optimizer(self.model, self._name, betas=self._task.betas)

    def scale_rate(self, factor: float) -> None:
        """Makes every rate of the schedule `factor` times as high."""
        self._peak_rate *= factor

    def step(self, batch: Batch, position: float) -> float:
        """Takes one step, `position` steps into the learning rate's schedule, and returns the batch's loss."""
        warmup_steps, horizon_steps = self._task.warmup_steps, self._inner.step_count
        rate = learning_rate(position, peak=self._peak_rate, warmup_steps=warmup_steps, horizon_steps=horizon_steps)
        loss, _ = inner_step(self.model, self._optimizer, batch.to(self._device), rate=rate)
        return float(loss)

    def judge(self, data: str = PYTHON) -> float:
        """The loss on held-out text, in nats a token."""
        self.model.eval()
        loss = evaluate(self.model, [batch.to(self._device) for batch in _held_out(self._inner.task, data)])
        self.model.train()
        return loss


def sampler(
    shard: int, shard_count: int, *, seed: int, task: str = BYTES, data: str = PYTHON, batch_size: int = 0
) -> BatchSampler:
    """The batches of the learner that trains on part `shard` (from 1) of `shard_count`; 0 windows: the task's."""
    settings = task_of(task)
    tokens = _corpus(task, data, (shard, shard_count)).train
    size = batch_size or settings.batch_size
    return BatchSampler(tokens, settings.config, batch_size=size, seed=seed, learner=f"learner-{shard}")


def joined(batches: list[Batch]) -> Batch:
    """One batch of all their rows."""
    return Batch(torch.cat([one.tokens for one in batches]), torch.cat([one.targets for one in batches]))


@lru_cache
def _base(seed: int) -> dict[str, Tensor]:
    """The weights of a model that was trained on Python, the same for every arm under one seed."""
    training = InnerTraining(Inner(BASE_RATE, BASE_STEPS), seed=seed)
    batches = sampler(1, 1, seed=seed, batch_size=2 * task_of(BYTES).batch_size)
    for step in range(BASE_STEPS):
        training.step(batches.batch(step), step)
    weights: dict[str, Tensor] = training.model.state_dict()
    return weights


@lru_cache
def _corpus(task: str, data: str, shard: tuple[int, int] = (1, 1)) -> Corpus:
    return task_of(task).load(data, shard)


@lru_cache
def _held_out(task: str, data: str) -> list[Batch]:
    settings = task_of(task)
    tokens, count = _corpus(task, data).held_out, settings.held_out_windows
    return held_out_batches(tokens, settings.config, batch_size=_EVALUATION_BATCH, window_count=count)
