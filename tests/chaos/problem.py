"""What the learners train: a small network that learns from a teacher of the same shape, so that the loss means something.

Samples are drawn without end, so every learner has data of its own, and two runs over as many tokens learn as much.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

Arrays = dict[str, NDArray[np.float32]]

SHAPES: Final[dict[str, tuple[int, ...]]] = {
    "first.weight": (12, 8),
    "first.bias": (8,),
    "second.weight": (8, 6),
    "second.bias": (6,),
}
NUMEL: Final = sum(int(np.prod(shape)) for shape in SHAPES.values())
BATCH: Final = 32  # samples, which count as tokens
_RATE: Final = 0.05
_SHARPNESS: Final = 1.5
_HELD_OUT: Final = 20_000


def initial() -> Arrays:
    """Returns the student's first weights, the same for everybody."""
    return _drawn(np.random.default_rng(1), 0.3)


def descend(arrays: Arrays, source: np.random.Generator) -> float:
    """Takes a step of SGD in place on a fresh batch, and returns the batch's loss."""
    x, y = _samples(source, BATCH)
    hidden, odds = _forward(arrays, x)
    loss = float(-np.log(odds[np.arange(len(y)), y]).mean())
    odds[np.arange(len(y)), y] -= 1
    odds /= len(y)
    below = (odds @ arrays["second.weight"].T) * (1 - hidden**2)
    for name, gradient in (
        ("second.weight", hidden.T @ odds),
        ("second.bias", odds.sum(axis=0)),
        ("first.weight", x.T @ below),
        ("first.bias", below.sum(axis=0)),
    ):
        arrays[name] -= (_RATE * gradient).astype(np.float32)
    return loss


def held_out_loss(arrays: Mapping[str, NDArray[np.float32]]) -> float:
    """Returns the mean loss on samples that nobody trains on."""
    x, y = _samples(np.random.default_rng(2), _HELD_OUT)
    _, odds = _forward(arrays, x)
    return float(-np.log(odds[np.arange(len(y)), y]).mean())


def flat(arrays: Mapping[str, NDArray[np.float32]]) -> NDArray[np.float32]:
    """Returns all weights, `(NUMEL,)`, in the order of `SHAPES`; a copy."""
    return np.concatenate([arrays[name].reshape(-1) for name in SHAPES])


def _drawn(source: np.random.Generator, scale: float) -> Arrays:
    return {name: (source.standard_normal(shape) * scale).astype(np.float32) for name, shape in SHAPES.items()}


_TEACHER: Final = _drawn(np.random.default_rng(0), 1.0)


def _samples(source: np.random.Generator, count: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    x = source.standard_normal((count, SHAPES["first.weight"][0])).astype(np.float32)
    _, odds = _forward(_TEACHER, x, _SHARPNESS)
    draws = source.random((count, 1))
    return x, (odds.cumsum(axis=1) < draws).sum(axis=1).clip(max=odds.shape[1] - 1)


def _forward(
    arrays: Mapping[str, NDArray[np.float32]], x: NDArray[np.float32], sharpness: float = 1.0
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Returns the hidden layer and the odds of each class."""
    hidden = np.tanh(x @ arrays["first.weight"] + arrays["first.bias"])
    scores = sharpness * (hidden @ arrays["second.weight"] + arrays["second.bias"])
    scores -= scores.max(axis=1, keepdims=True)
    odds = np.exp(scores)
    return hidden, odds / odds.sum(axis=1, keepdims=True)
