"""What the learners train: a classifier that learns from a teacher of its own shape, on samples drawn without end.

The loss has one minimum, which a run of a minute comes close to. So it says whether what was learned is in the weights
and nothing else is: work that is lost for good, merged twice or damaged keeps the run away from the minimum.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

Arrays = dict[str, NDArray[np.float32]]

SHAPES: Final[dict[str, tuple[int, ...]]] = {
    "left.weight": (12, 6),
    "right.weight": (12, 6),
    "bias": (6,),
}
NUMEL: Final = sum(int(np.prod(shape)) for shape in SHAPES.values())
BATCH: Final = 32  # samples, which count as tokens
_RATE: Final = 0.15
_INPUTS: Final = 24
_HELD_OUT: Final = 20_000


def initial() -> Arrays:
    """Returns the student's first weights, the same for everybody."""
    return _drawn(np.random.default_rng(1), 0.3)


def descend(arrays: Arrays, source: np.random.Generator) -> float:
    """Takes a step of SGD in place on a fresh batch, and returns the batch's loss."""
    x, y = _samples(source, BATCH)
    odds = _odds(arrays, x)
    loss = float(-np.log(odds[np.arange(len(y)), y]).mean())
    odds[np.arange(len(y)), y] -= 1
    gradient = x.T @ odds / len(y)
    for name, part in (("left.weight", gradient[:12]), ("right.weight", gradient[12:]), ("bias", odds.mean(axis=0))):
        arrays[name] -= (_RATE * part).astype(np.float32)
    return loss


def held_out_loss(arrays: Mapping[str, NDArray[np.float32]]) -> float:
    """Returns the mean loss on samples that nobody trains on."""
    x, y = _samples(np.random.default_rng(2), _HELD_OUT)
    odds = _odds(arrays, x)
    return float(-np.log(odds[np.arange(len(y)), y]).mean())


def flat(arrays: Mapping[str, NDArray[np.float32]]) -> NDArray[np.float32]:
    """Returns all weights, `(NUMEL,)`, in the order of `SHAPES`; a copy."""
    return np.concatenate([arrays[name].reshape(-1) for name in SHAPES])


def _drawn(source: np.random.Generator, scale: float) -> Arrays:
    return {name: (source.standard_normal(shape) * scale).astype(np.float32) for name, shape in SHAPES.items()}


_TEACHER: Final = _drawn(np.random.default_rng(0), 0.5)


def _samples(source: np.random.Generator, count: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    x = source.standard_normal((count, _INPUTS)).astype(np.float32)
    draws = source.random((count, 1))
    odds = _odds(_TEACHER, x)
    return x, (odds.cumsum(axis=1) < draws).sum(axis=1).clip(max=odds.shape[1] - 1)


def _odds(arrays: Mapping[str, NDArray[np.float32]], x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Returns the odds of each class, `(samples, classes)`."""
    scores = x[:, :12] @ arrays["left.weight"] + x[:, 12:] @ arrays["right.weight"] + arrays["bias"]
    odds: NDArray[np.float32] = np.exp(scores - scores.max(axis=1, keepdims=True))
    odds /= odds.sum(axis=1, keepdims=True)
    return odds
