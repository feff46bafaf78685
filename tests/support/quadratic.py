"""The smallest thing to train: arrays that roll down a bowl, with a little noise of their own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from skerry import ArrayLearner, Policy

QUICK = Policy(inner_step_count=4, lease_term_s=1.0)
# How long an emulated inner step takes.
STEP_S = 0.002


class Quadratic:
    """Arrays, and the goal that they descend to."""

    def __init__(self, seed: int = 0) -> None:
        goals = np.random.default_rng(0)
        self.goal = {
            "embedding.weight": goals.normal(size=(300, 8)).astype(np.float32),
            "body.weight": goals.normal(size=(24, 32)).astype(np.float32),
            "body.bias": goals.normal(size=32).astype(np.float32),
        }
        self.arrays: dict[str, NDArray[np.float32]] = {name: np.zeros_like(goal) for name, goal in self.goal.items()}
        self._noise = np.random.default_rng(seed)

    def descend(self) -> float:
        """Takes an inner step and returns the loss after it."""
        threading.Event().wait(STEP_S)
        for name, array in self.arrays.items():
            noise = self._noise.normal(scale=0.01, size=array.shape)
            array[...] -= (0.05 * (array - self.goal[name] + noise)).astype(np.float32)
        return self.loss

    @property
    def loss(self) -> float:
        """Mean squared distance from the goal."""
        distances = [((array - self.goal[name]) ** 2).ravel() for name, array in self.arrays.items()]
        return float(np.concatenate(distances).mean())


def train_until(
    learners: Sequence[tuple[Quadratic, ArrayLearner]], is_over: Callable[[], bool], timeout_s: float = 60.0
) -> None:
    """Trains the learners in turn until the condition holds.

    Raises:
        TimeoutError: it does not within `timeout_s`.
    """
    deadline_s = time.monotonic() + timeout_s
    while not is_over():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"condition does not hold: {[learner.stats for _, learner in learners]}")
        for problem, learner in learners:
            learner.step(tokens=8, loss=problem.descend())
