"""How good the models are: every one measured on the same held-out windows, by the same code."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import load_file

from skerry.demo.plan import TrainingPlan
from skerry.learner.batches import BatchSampler, held_out_batches
from skerry.learner.corpus import Corpus, ShardSelection, load_corpus
from skerry.learner.inner_training import evaluate
from skerry.learner.model import MODEL_CONFIGS, Gpt

_WARM_UP_STEPS: Final = 3
_TIMED_STEPS: Final = 9


@dataclass(frozen=True)
class JudgedPosition:
    """The merged model at one position of the log."""

    position: int
    unix_s: float
    loss: float


class Judge:
    """Measures checkpoints on the held-out windows that the learners measure themselves on."""

    def __init__(self, training: TrainingPlan) -> None:
        """Read the data and keep the windows."""
        self._config = MODEL_CONFIGS[training.model]
        self._corpus = load_corpus(None, shard=ShardSelection())
        self._windows = held_out_batches(
            self._corpus.held_out,
            batch_size=training.batch_size,
            context=self._config.context,
            vocabulary=self._config.vocabulary,
            window_count=training.evaluation_window_count,
        )
        self._model = Gpt(self._config)

    @property
    def parameter_count(self) -> int:
        """Of the model that is judged."""
        return self._model.parameter_count

    @property
    def corpus(self) -> Corpus:
        """What is trained on and judged by."""
        return self._corpus

    def loss_of_export(self, path: Path) -> float:
        """The held-out loss of weights in a safetensors file."""
        self._model.load_state_dict(load_file(path))
        return evaluate(self._model, self._windows)

    def loss_of_checkpoint(self, path: Path) -> float:
        """The held-out loss of a learner's own checkpoint."""
        self._model.load_state_dict(torch.load(path, weights_only=True)["model"])
        return evaluate(self._model, self._windows)

    def step_time_s(self, training: TrainingPlan) -> float:
        """The median time of an inner step on this machine, on one thread, with nothing else running."""
        model = Gpt(self._config)
        sampler = BatchSampler(
            self._corpus.train,
            batch_size=training.batch_size,
            context=self._config.context,
            vocabulary=self._config.vocabulary,
            seed=training.seed,
            learner="calibration",
        )
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        times_s = []
        for step in range(_WARM_UP_STEPS + _TIMED_STEPS):
            begun_s = time.perf_counter()
            batch = sampler.batch(step)
            model.loss(batch.tokens, batch.targets).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            times_s.append(time.perf_counter() - begun_s)
        return statistics.median(times_s[_WARM_UP_STEPS:])
