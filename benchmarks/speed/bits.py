"""Bits a parameter on the wire with the defaults, on deltas of real training: both ways, and what they consist of.

Two learners train a small GPT on the source text of Python's standard library, through a real syncer. The parts are
those of a delta of H steps of the same training, encoded with and without zstd.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.processes import served
from benchmarks.report import Row, measured
from benchmarks.speed.measuring import SEED, Size
from skerry import Learner, Policy
from skerry_learner.batches import BatchSampler
from skerry_learner.corpus import load_corpus
from skerry_learner.inner_training import inner_step, make_optimizer
from skerry_learner.model import Gpt
from skerry_learner.settings import MODEL_CONFIGS

_LEARNERS: Final = 2
_BATCH: Final = 8
_RATE: Final = 1e-3
_FLUSH_S: Final = 30.0


class Trainer:
    """A model and what takes a step of it."""

    def __init__(self, number: int) -> None:
        config = MODEL_CONFIGS["tiny"]
        torch.manual_seed(SEED)  # all begin alike
        self.model = Gpt(config)
        tokens = load_corpus(None, shard=(number + 1, _LEARNERS)).train
        self._batches = BatchSampler(tokens, config, batch_size=_BATCH, seed=SEED, learner=f"learner-{number}")
        self._optimizer = make_optimizer(self.model)
        self._count = 0

    def step(self) -> int:
        """Takes one step and returns its tokens."""
        batch = self._batches.batch(self._count)
        inner_step(self.model, self._optimizer, batch, rate=_RATE)
        self._count += 1
        return batch.token_count

    def weights(self) -> dict[str, NDArray[np.float32]]:
        """Returns copies of the weights, matrices first, as a fragment has them."""
        found = {name: one.detach().numpy().copy() for name, one in self.model.named_parameters()}
        return dict(sorted(found.items(), key=lambda item: item[1].ndim <= 1))


def rows(size: Size) -> Iterator[Row]:
    """Both ways together, each way, and a delta's parts."""
    torch.set_num_threads(1)
    rounds = size.pick(6, 3)
    trainers = [Trainer(number) for number in range(_LEARNERS)]
    with (
        tempfile.TemporaryDirectory(prefix="skerry-benchmark-") as name,
        served(Path(name)) as syncer,
        ExitStack() as stack,
    ):
        learners = [
            stack.enter_context(
                Learner(
                    trainer.model,
                    target=syncer.target,
                    run="speed",
                    learner_id=f"learner-{number}",
                    create=True,
                    policy=Policy(quorum_count=_LEARNERS),
                )
            )
            for number, trainer in enumerate(trainers)
        ]
        before = [learner.stats for learner in learners]  # joining takes the weights as they are, in float32
        for _ in range(rounds * Policy().inner_step_count):
            for trainer, learner in zip(trainers, learners, strict=True):
                learner.step(tokens=trainer.step())
        for learner in learners:
            learner.flush(_FLUSH_S)  # or bytes of a push that is not acknowledged would count without its parameters
        after = [learner.stats for learner in learners]
    up, down = (
        [
            8
            * (getattr(new, f"bytes_{way}") - getattr(old, f"bytes_{way}"))
            / max(_moved(new, way) - _moved(old, way), 1)
            for old, new in zip(before, after, strict=True)
        ]
        for way in ("up", "down")
    )
    case = (
        f"GPT of {sum(one.size for one in trainers[0].weights().values()) / 1e6:.2g}M parameters, {_LEARNERS} learners"
    )
    unit = "bits/parameter"
    yield measured(case, "deltas, up", up, unit)
    yield measured(case, "updates, down", down, unit)
    yield measured(case, "both ways together", [one + other for one, other in zip(up, down, strict=True)], unit)


def _moved(stats: object, way: str) -> int:
    count: int = getattr(stats, f"parameters_{way}_count")
    return count
