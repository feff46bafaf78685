"""The model that every system synchronises: a GPT's tensors with 50.3M float32 parameters."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

_WIDTH: Final = 512
_BLOCKS: Final = 12
_VOCABULARY: Final = 24_576
# What training between two synchronisations changes a weight by, as a standard deviation.
STEP_SIZE: Final = 1e-3
_SAMPLED: Final = 256
_ODD: Final = 97  # sampled elements lie so far apart


def arrays() -> dict[str, NDArray[np.float32]]:
    """Returns the initial weights, the same for every learner."""
    generator = np.random.default_rng(20260)
    return {name: 0.02 * generator.standard_normal(shape, np.float32) for name, shape in _shapes().items()}


def _shapes() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"embedding.weight": (_VOCABULARY, _WIDTH)}
    for block in range(_BLOCKS):
        name = f"blocks.{block}."
        shapes[name + "norm"] = (2 * _WIDTH,)
        shapes[name + "attention"] = (3 * _WIDTH, _WIDTH)
        shapes[name + "projection"] = (_WIDTH, _WIDTH)
        shapes[name + "up"] = (4 * _WIDTH, _WIDTH)
        shapes[name + "down"] = (_WIDTH, 4 * _WIDTH)
    return shapes


class Training:
    """Changes weights in place as a learner's training would."""

    def __init__(self, number: int) -> None:
        self._noise = np.random.default_rng(number)

    def change(self, weights: list[NDArray[np.float32]]) -> None:
        """Adds noise of its own to each weight."""
        for array in weights:
            np.add(array, np.float32(STEP_SIZE) * self._noise.standard_normal(array.shape, np.float32), out=array)


def sample(weights: list[NDArray[np.float32]]) -> list[float]:
    """Returns some weights of every tensor, which tell whether learners agree."""
    return [float(one) for array in weights for one in array.reshape(-1)[::_ODD][:_SAMPLED]]
