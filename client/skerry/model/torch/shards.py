"""Which part of a tensor this process holds, if other processes hold the rest of it (DTensor)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch


class Region(NamedTuple):
    """The part of a tensor that one process holds: a box."""

    first: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Count of elements."""
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The box as an index of the whole tensor."""
        return tuple(slice(start, start + size) for start, size in zip(self.first, self.shape, strict=True))


def is_sharded(tensor: object) -> bool:
    """Whether it is a DTensor."""
    return hasattr(tensor, "to_local")  # DTensor's module is not imported unless it is used


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Returns what this process holds of a tensor, which shares its memory."""
    with torch.no_grad():
        return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def region_of(name: str, tensor: torch.Tensor) -> Region:
    """Returns which part of a tensor this process holds.

    A DTensor is cut by one dimension of its mesh after another, into parts of equal size, of which the last ones may be
    smaller. `fully_shard` cuts last, although its dimensions of the mesh come first: what tensor parallelism has left.

    Raises:
        ValueError: it is cut in another way.
    """
    first, shape = [0] * tensor.dim(), list(tensor.shape)
    if not is_sharded(tensor):
        return Region(tuple(first), tuple(shape))
    mesh, placements = tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]
    kinds = [type(placement).__name__ for placement in placements]
    is_known = set(kinds) <= {"Shard", "_StridedShard", "Replicate"}
    cuts = [axis for axis, kind in enumerate(kinds) if kind != "Replicate"] if is_known else []
    for axis in sorted(cuts, key=lambda axis: kinds[axis] == "_StridedShard"):
        dim = placements[axis].dim
        if kinds[axis] == "_StridedShard":
            before = [mesh.size(later) for later in cuts if later > axis and placements[later].dim == dim]
            is_known &= placements[axis].split_factor == math.prod(before)
        size = -(-shape[dim] // mesh.size(axis))
        start = min(size * mesh.get_local_rank(axis), shape[dim])
        first[dim] += start
        shape[dim] = min(size, shape[dim] - start)
    if not is_known or tuple(shape) != tuple(local_part(tensor).shape):
        raise ValueError(
            "a parameter is cut in a way that fully_shard and tensor parallelism do not use, so it can't be exchanged. "
            f"parameter={name}, placements={placements}"
        )
    return Region(tuple(first), tuple(shape))


def first_holders(parts: Sequence[Region]) -> tuple[int, ...]:
    """Returns for each rank the first one that holds the same part of a tensor; itself if it holds none."""
    return tuple(parts.index(part) if part.numel else rank for rank, part in enumerate(parts))
