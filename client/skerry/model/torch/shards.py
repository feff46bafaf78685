"""Which part of a tensor this process holds, if other processes hold the rest of it (DTensor)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
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


class Box(NamedTuple):
    """What one rank holds of a tensor, by its place in a flat vector. Its elements are in the vector's order."""

    offset: int  # of the tensor's first element
    shape: tuple[int, ...]  # of the whole tensor
    region: Region

    def count_before(self, element: int) -> int:
        """Returns how many of its elements lie before an element of the vector."""
        stride, inner = math.prod(self.shape), self.region.numel
        if element >= self.offset + stride:
            return inner
        rest, count = max(0, element - self.offset), 0
        for size, first, held in zip(self.shape, *self.region, strict=True):
            stride, inner = stride // size, inner // held
            index, rest = divmod(rest, stride)
            count += min(max(0, index - first), held) * inner
            if not first <= index < first + held:
                break
        return count

    def views(self, values: torch.Tensor, first: int) -> Iterator[torch.Tensor]:
        """Yields, in order, views of what a range of the vector has of it; `values` is the range from `first` on."""
        start = max(first, self.offset)
        stop = min(first + len(values), self.offset + math.prod(self.shape))
        if start < stop:
            yield from _views(values[start - first : stop - first], start - self.offset, self.shape, self.region)


def _views(values: torch.Tensor, first: int, shape: tuple[int, ...], region: Region) -> Iterator[torch.Tensor]:
    """Yields what a range of a tensor, which begins at its element `first`, has of a region."""
    if not shape:
        yield values
        return
    (lowest, *_), (held, *_) = region
    inside = Region(region.first[1:], region.shape[1:])
    row = math.prod(shape[1:])
    while len(values):
        index, at = divmod(first, row)
        count = 0 if at else len(values) // row
        if count:
            rows = values[: count * row].view(count, *shape[1:])
            low, high = max(lowest - index, 0), min(lowest + held - index, count)
            if low < high:
                yield rows[(slice(low, high), *inside.slices)]
        elif lowest <= index < lowest + held:
            yield from _views(values[: row - at], at, shape[1:], inside)
        taken = count * row or row - at
        values, first = values[taken:], first + taken


def is_sharded(tensor: object) -> bool:
    """Whether it is a DTensor."""
    return hasattr(tensor, "to_local")  # DTensor's module is not imported unless it is used


def is_cut(tensor: torch.Tensor) -> bool:
    """Whether other processes hold parts of a tensor that this one does not, or is a sum of what they hold."""
    if not is_sharded(tensor):
        return False
    sizes, placements = tensor.device_mesh.shape, tensor.placements  # type: ignore[attr-defined]
    return any(size > 1 and not one.is_replicate() for size, one in zip(sizes, placements, strict=True))


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
            before = [mesh.size(one) for one in cuts if one > axis and placements[one].dim == dim]
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
