"""The held-out loss of every model of the demo, measured by the same code on the same windows."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import load_file

from skerry_demo.plan import TrainingPlan
from skerry_learner.batches import BatchSampler, held_out_batches
from skerry_learner.corpus import ShardSelection, load_corpus
from skerry_learner.inner_training import evaluate, inner_step, make_optimizer
from skerry_learner.model import MODEL_CONFIGS, Gpt
from skerry_learner.settings import OptimizerSettings

_WARM_UP_STEPS: Final = 3
_TIMED_STEPS: Final = 9


@dataclass(frozen=True)
class JudgedPosition:
    """The merged model at one position of the log."""

    position: int
    unix_s: float
    loss: float


class Judge:
    """Measures weights on the held-out windows that the learners use too."""

    def __init__(self, training: TrainingPlan) -> None:
        """Read the data and cut the windows."""
        self._training = training
        self._config = MODEL_CONFIGS[training.model]
        self._corpus = load_corpus(None, shard=ShardSelection())
        self._windows = held_out_batches(
            self._corpus.held_out,
            self._config,
            batch_size=training.batch_size,
            window_count=training.evaluation_window_count,
        )
        self._model = Gpt(self._config)

    @property
    def parameter_count(self) -> int:
        """The number of parameters of the model."""
        return self._model.parameter_count

    def loss_of_export(self, path: Path) -> float:
        """The held-out loss of weights in a safetensors file."""
        self._model.load_state_dict(load_file(path))
        return evaluate(self._model, self._windows)

    def loss_of_checkpoint(self, path: Path) -> float:
        """The held-out loss of a learner's own checkpoint."""
        self._model.load_state_dict(torch.load(path, weights_only=True)["model"])
        return evaluate(self._model, self._windows)

    def step_time_s(self) -> float:
        """The median time of an inner step on this machine, on one thread, while nothing else runs."""
        model = Gpt(self._config)
        sampler = BatchSampler(
            self._corpus.train,
            self._config,
            batch_size=self._training.batch_size,
            seed=self._training.seed,
            learner="calibration",
        )
        settings = OptimizerSettings(peak_rate=self._training.learning_rate)
        optimizer = make_optimizer(model, settings)
        times_s = []
        for step in range(_WARM_UP_STEPS + _TIMED_STEPS):
            begun_s = time.perf_counter()
            batch = sampler.batch(step)
            inner_step(model, optimizer, batch, rate=settings.peak_rate, norm_limit=settings.gradient_norm_limit)
            times_s.append(time.perf_counter() - begun_s)
        return statistics.median(times_s[_WARM_UP_STEPS:])
