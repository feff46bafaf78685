"""Squared norms per tensor of a range, which merging and the guards need of a delta."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from skerry.wire.layout import FragmentLayout

_CHUNK_NUMEL: Final = 2**16
"""Elements squared at a time: half a megabyte of float64 that stays in cache, however large the fragment."""


def per_tensor_squared_norms(
    values: NDArray[np.float32],  # (numel of the range,)
    layout: FragmentLayout,
    first: int = 0,
) -> NDArray[np.float64]:
    """Return `(len(layout.tensors),)`: the sum of squares of what each tensor has in the range, 0 outside it.

    The sums of disjoint ranges add up to the fragment's. The last bits depend on the machine, so a norm is recorded
    once and never computed again to compare.
    """
    norms = np.zeros(len(layout.tensors), np.float64)
    squares = np.empty(min(_CHUNK_NUMEL, len(values)), np.float64)
    for index, start, stop in layout.ranges(first, len(values)):
        for low in range(start, stop, _CHUNK_NUMEL):
            chunk = values[low - first : min(low + _CHUNK_NUMEL, stop) - first]
            norms[index] += np.square(chunk, out=squares[: len(chunk)], dtype=np.float64).sum()
    return norms
