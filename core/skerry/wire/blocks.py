"""Blocks: runs of elements that share a scale. They restart at each tensor, and a tensor's last one may be short."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from skerry.wire.layout import FragmentLayout


@dataclass(frozen=True)
class Blocks:
    """The blocks of a range, in order.

    A range is *even* when all blocks but the last are full, so that it can be seen as a matrix of blocks
    and one short tail. Only uneven ranges need `starts`.
    """

    numel: int
    size: int
    count: int
    starts: NDArray[np.int64] | None  # (count,) first element of each block, from the range's first; None: even

    @property
    def full_count(self) -> int:
        """Full blocks at the front of an even range."""
        return self.numel // self.size

    @property
    def lengths(self) -> NDArray[np.int64]:
        """`(count,)` elements of each block of an uneven range."""
        assert self.starts is not None
        return np.diff(self.starts, append=self.numel)


def blocks_of(layout: FragmentLayout, first: int, numel: int, size: int) -> Blocks:
    """Return the blocks of `size` elements in the range.

    Raises:
        ValueError: the range is not inside the fragment, or does not start and end at block boundaries.
    """
    stop = first + numel
    if first < 0 or numel < 1 or stop > layout.numel:
        msg = f"range outside the fragment. first={first}, numel={numel}, fragment_numel={layout.numel}"
        raise ValueError(msg)
    if not (layout.is_boundary(first, size) and layout.is_boundary(stop, size)):
        msg = f"range not cut at block boundaries. first={first}, numel={numel}, block={size}"
        raise ValueError(msg)
    low, high = layout.tensor_at(first), layout.tensor_at(stop - 1)
    if low == high:
        return Blocks(numel, size, -(-numel // size), None)
    # Vectorised over tensors, because a Python loop over many tiny tensors would be slow.
    bounds = layout.bounds[low : high + 2].clip(first, stop) - first  # (tensors + 1,)
    lengths = np.diff(bounds)
    counts = -(-lengths // size)
    total = int(counts.sum())
    if not (lengths[:-1] % size).any():
        return Blocks(numel, size, total, None)
    nth_in_tensor = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
    return Blocks(numel, size, total, np.repeat(bounds[:-1], counts) + nth_in_tensor * size)
