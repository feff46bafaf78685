"""The shapes that are measured: a GPT's matrices and vectors, as many as make about so many parameters."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.speed.measuring import SEED
from skerry.wire.layout import FragmentLayout, TensorSpec

_BLOCKS: Final = 12
_ROWS_A_BLOCK: Final = 12  # a block of width d has 12 d^2 weights
_VOCABULARY_SHARE: Final = 0.1


def shapes_of(numel: int) -> dict[str, tuple[int, ...]]:
    """Returns the tensors of a GPT of about `numel` parameters: an embedding, and 12 blocks of four matrices."""
    width = max(64, round((numel * (1 - _VOCABULARY_SHARE) / (_BLOCKS * _ROWS_A_BLOCK)) ** 0.5) // 64 * 64)
    blocks = _BLOCKS * _ROWS_A_BLOCK * width * width
    shapes: dict[str, tuple[int, ...]] = {"embedding.weight": (max(256, (numel - blocks) // width), width)}
    for block in range(_BLOCKS):
        name = f"blocks.{block}."
        shapes[name + "norm"] = (2 * width,)
        shapes[name + "attention"] = (3 * width, width)
        shapes[name + "projection"] = (width, width)
        shapes[name + "up"] = (4 * width, width)
        shapes[name + "down"] = (width, 4 * width)
    return shapes


def arrays_of(numel: int) -> dict[str, NDArray[np.float32]]:
    """Returns arrays of these shapes with a model's initial weights."""
    generator = np.random.default_rng(SEED)
    return {name: 0.02 * generator.standard_normal(shape, np.float32) for name, shape in shapes_of(numel).items()}


def layout_of(numel: int) -> FragmentLayout:
    """Returns the same tensors as one fragment."""
    tensors = tuple(TensorSpec(name, shape) for name, shape in shapes_of(numel).items())
    return FragmentLayout("fragment", tensors)
