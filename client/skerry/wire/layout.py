"""Names and ids, and fragments with their tensors, which form one flat vector of elements.

Names and ids become paths in the store, so they are checked before anything else.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Final

import numpy as np
from numpy.typing import NDArray

_NAME: Final = re.compile(r"[a-z0-9](?:[a-z0-9._-]{0,62}[a-z0-9])?")
_ID: Final = re.compile(r"[0-9a-f]{32}")
MAX_TENSOR_NAME_BYTES: Final = 512
# Dimensions of a tensor, which are as many as PyTorch and NumPy allow.
MAX_DIMS: Final = 64


class BadNameError(ValueError):
    """A name or id that does not match its pattern; reason `BAD_NAME`."""


def check_name(name: str, kind: str) -> str:
    """Returns `name` if it is a legal name of a `kind` (run, fragment, learner, region).

    Raises:
        BadNameError: it is not; nothing was done.
    """
    if _NAME.fullmatch(name) is None or ".." in name:
        raise BadNameError(
            f"{kind} name is not legal: use 1 to 64 of a-z 0-9 . _ -, starting and ending with a letter or digit, "
            f"no '..'. name={name[:80]!r}"
        )
    return name


def check_id(value: str, kind: str) -> str:
    """Returns `value` if it is 32 lower-case hexadecimal digits.

    Raises:
        BadNameError: it is not; nothing was done. What it is instead may be a secret, and is not said.
    """
    if _ID.fullmatch(value) is None:
        raise BadNameError(f"{kind} is not legal: use 32 lower-case hexadecimal digits. length={len(value)}")
    return value


@dataclass(frozen=True)
class TensorSpec:
    """A tensor's name and shape; its elements lie in row-major order."""

    name: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        """Refuse a shape that no tensor has."""
        if len(self.shape) > MAX_DIMS:  # their product would take for ever
            raise ValueError(f"too many dimensions. tensor={self.name}, limit={MAX_DIMS}, actual={len(self.shape)}")
        if any(size < 0 for size in self.shape):
            raise ValueError(f"negative size in shape. tensor={self.name}, shape={self.shape}")

    @property
    def numel(self) -> int:
        """Count of elements; 1 for a scalar, 0 where any size is 0."""
        return math.prod(self.shape)

    @property
    def is_vector(self) -> bool:
        """Whether it has at most one dimension (biases, norms' gains, scalars)."""
        return len(self.shape) <= 1


@dataclass(frozen=True)
class FragmentLayout:
    """A fragment's tensors in order, which say to which tensor each element of the flat vector belongs.

    Raises:
        ValueError: two tensors share a name.
    """

    name: str
    tensors: tuple[TensorSpec, ...]

    def __post_init__(self) -> None:
        """Refuse a name that is used twice."""
        if len({tensor.name for tensor in self.tensors}) != len(self.tensors):
            raise ValueError(f"a tensor's name is repeated. fragment={self.name}")

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Elements of each tensor."""
        return tuple(tensor.numel for tensor in self.tensors)

    @cached_property
    def numel(self) -> int:
        """Count of the fragment's elements."""
        return sum(self.sizes)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """First element of each tensor."""
        return tuple(accumulate(self.sizes, initial=0))[:-1]

    @cached_property
    def bounds(self) -> NDArray[np.int64]:
        """`(len(tensors) + 1,)`: the first element of each tensor, then `numel`. Not to be written to."""
        bounds = np.array((*self.offsets, self.numel), np.int64)
        bounds.setflags(write=False)
        return bounds

    def tensor_at(self, element: int) -> int:
        """Index of the tensor that holds `element`, 0 <= element < numel."""
        return bisect_right(self.offsets, element) - 1

    def bounds_within(self, first: int, stop: int) -> NDArray[np.int64]:
        """Return `first`, where other tensors begin before `stop`, and `stop`; the range must not be empty."""
        bounds = self.bounds[self.tensor_at(first) : self.tensor_at(stop - 1) + 2].copy()
        bounds[0], bounds[-1] = first, stop
        return bounds

    def ranges(self, first: int, numel: int) -> Iterator[tuple[int, int, int]]:
        """Yield `(tensor index, start, stop)`, in fragment elements, of what each tensor has in the range.

        Empty tensors are left out. The range is clipped to the fragment.
        """
        stop = min(first + numel, self.numel)
        start = max(first, 0)
        index = self.tensor_at(start)
        while start < stop:
            end = min(self.offsets[index] + self.sizes[index], stop)
            if end > start:
                yield index, start, end
                start = end
            index += 1

    def pieces(self, flat: NDArray[np.float32]) -> list[tuple[str, NDArray[np.float32]]]:
        """Return for each tensor its name and a view of `flat`, (numel,), in its shape."""
        return [
            (tensor.name, flat[first : first + tensor.numel].reshape(tensor.shape))
            for tensor, first in zip(self.tensors, self.offsets, strict=True)
        ]

    def is_boundary(self, element: int, block: int) -> bool:
        """Whether `element` starts a block of its tensor, or ends the fragment."""
        return self.boundary_at_or_before(element, block) == element

    def boundary_at_or_before(self, element: int, block: int) -> int:
        """Return the last element <= `element`, 0 <= element <= numel, at which a range may be cut."""
        if element >= self.numel:
            return self.numel
        start = self.offsets[self.tensor_at(element)]
        return element - (element - start) % block


@dataclass(frozen=True)
class Blocks:
    """The blocks of a range, in order: the elements that share a scale.

    Blocks restart at each tensor, and a tensor's last one may be short.
    """

    size: int
    edges: NDArray[np.uint64]  # (count + 1,) first element of each block, from the range's first; then numel

    @property
    def numel(self) -> int:
        """Elements of the range."""
        return int(self.edges[-1])

    @property
    def count(self) -> int:
        """Blocks of the range."""
        return len(self.edges) - 1

    @property
    def lengths(self) -> NDArray[np.int64]:
        """`(count,)` elements of each block."""
        edges = self.edges.astype(np.int64)
        return edges[1:] - edges[:-1]


@lru_cache(64)
def _even_edges(numel: int, size: int) -> NDArray[np.uint64]:
    edges = np.append(np.arange(0, numel, size), numel).astype(np.uint64)
    edges.flags.writeable = False
    return edges


def blocks_of(layout: FragmentLayout, first: int, numel: int, size: int) -> Blocks:
    """Returns the blocks of `size` elements in the range.

    Raises:
        ValueError: the range is not inside the fragment, or does not start and end at block boundaries.
    """
    stop = first + numel
    if first < 0 or numel < 1 or stop > layout.numel:
        raise ValueError(f"range outside the fragment. first={first}, numel={numel}, fragment_numel={layout.numel}")
    if not (layout.is_boundary(first, size) and layout.is_boundary(stop, size)):
        raise ValueError(f"range not cut at block boundaries. first={first}, numel={numel}, block={size}")
    # Vectorised over tensors, because a Python loop over many tiny tensors would be slow.
    bounds = layout.bounds_within(first, stop) - first  # (tensors + 1,)
    lengths = np.diff(bounds)
    if not (lengths[:-1] % size).any():
        return Blocks(size, _even_edges(numel, size))
    counts = -(-lengths // size)
    nth_in_tensor = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = np.repeat(bounds[:-1], counts) + nth_in_tensor * size
    return Blocks(size, np.append(starts, numel).astype(np.uint64))
