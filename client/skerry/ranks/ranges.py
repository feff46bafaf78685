"""Moves the elements of a vector between the ranks of an island, from what they hold of it to ranges of it, and back.

A rank may hold boxes of tensors, as those of a model's shards are, or a range. In either case the elements that it has
of a range follow one another in what it holds. So boxes are sent as they are, and who has the range puts their elements
in their places, or picks them from there.
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final

import torch
from torch import distributed

from skerry.model.torch.shards import Box, Region
from skerry.ranks.island import Island
from skerry.v1 import exchange_pb2
from skerry.wire import Encoding, FragmentLayout
from skerry.wire.codecs import cut_parts
from skerry.wire.digests import LEAF_NUMEL

# Elements that a rank is sent at a time.
PIECE_NUMEL: Final = 2**20


def even_bounds(numel: int, count: int) -> list[int]:
    """Returns where each of `count` ranges of a vector begins, and its length."""
    return [numel * rank // count for rank in range(count + 1)]


def part_bounds(layout: FragmentLayout, encoding: Encoding, part_size_bytes: int, count: int) -> list[int]:
    """Returns the bounds of `count` ranges of a fragment, each of which consists of whole parts.

    They are as even as these allow. Of several fragments of one part each, different ranges have it.
    """
    return _even(layout, [first for first, _ in cut_parts(layout, encoding, part_size_bytes)], count)


def plan_bounds(layout: FragmentLayout, plan: exchange_pb2.PullPlan, count: int) -> list[int]:
    """Returns the bounds of `count` ranges of a fragment, as even as a plan's objects allow.

    Each range has whole objects of every version in the plan, and whole leaves of the tree digest.
    """
    begins: defaultdict[int, set[int]] = defaultdict(set)
    for described in plan.objects:
        begins[described.version].add(described.first)
    common = {one for one in set.intersection(*begins.values()) if 0 < one < layout.numel and not one % LEAF_NUMEL}
    return _even(layout, sorted({0, *common}), count)


def _even(layout: FragmentLayout, begins: list[int], count: int) -> list[int]:
    """Returns bounds among these places where a range may begin, the first of which is 0.

    Of several fragments with fewer places than ranges, different ranges are empty.
    """
    edges, wanted = [*begins, layout.numel], even_bounds(layout.numel, count)[1:-1]
    if len(begins) < count:
        shift = edges[1] * (zlib.crc32(layout.tensors[0].name.encode()) % count) // count
        return [0, *(edges[bisect_right(edges, one + shift) - 1] for one in wanted), layout.numel]
    return [0, *(min(edges, key=lambda edge: abs(edge - one)) for one in wanted), layout.numel]


def range_boxes(bounds: Sequence[int]) -> list[list[Box]]:
    """Returns what each rank holds of a vector that is spread by these bounds."""
    return [
        [Box(0, (bounds[-1],), Region((first,), (stop - first,)))] if first < stop else []
        for first, stop in pairwise(bounds)
    ]


def to_ranges(
    island: Island,
    group: distributed.ProcessGroup,
    held: torch.Tensor,  # what this rank holds, float32
    boxes: Sequence[Sequence[Box]],  # what each rank holds, in the vector's order
    bounds: Sequence[int],
) -> torch.Tensor:
    """Returns this rank's range of a vector; every rank calls it, with what it holds.

    Raises:
        StopExchangingError: RANK_LEFT.
    """
    rank = island.rank
    out = torch.empty(bounds[rank + 1] - bounds[rank], dtype=torch.float32, device="cpu")
    for pieces in _pieces(bounds):
        sent = [held[_count(boxes[rank], first) : _count(boxes[rank], stop)] for first, stop in pieces]
        first, stop = pieces[rank]
        counts = [_count(one, stop) - _count(one, first) for one in boxes]
        arrived = island.exchange(sent, counts, group)
        piece = out[first - bounds[rank] : stop - bounds[rank]]
        for view in (view for one in boxes for view in _views(one, piece, first)):
            view.copy_(arrived[: view.numel()].view(view.shape))
            arrived = arrived[view.numel() :]
    return out


def to_boxes(
    island: Island,
    group: distributed.ProcessGroup,
    held: torch.Tensor,  # this rank's range, float32
    bounds: Sequence[int],
    boxes: Sequence[Sequence[Box]],  # what each rank is to hold, in the vector's order
) -> torch.Tensor:
    """Returns what this rank's boxes have of a vector; every rank calls it, with its range.

    Raises:
        StopExchangingError: RANK_LEFT.
    """
    rank = island.rank
    out = torch.empty(sum(box.region.numel for box in boxes[rank]), dtype=torch.float32, device="cpu")
    for pieces in _pieces(bounds):
        first, stop = pieces[rank]
        piece = held[first - bounds[rank] : stop - bounds[rank]]
        sent = [torch.cat([held[:0], *(view.reshape(-1) for view in _views(one, piece, first))]) for one in boxes]
        places = [(_count(boxes[rank], first), _count(boxes[rank], stop)) for first, stop in pieces]
        arrived = island.exchange(sent, [end - start for start, end in places], group)
        for start, end in places:
            out[start:end] = arrived[: end - start]
            arrived = arrived[end - start :]
    return out


def _pieces(bounds: Sequence[int]) -> Iterator[list[tuple[int, int]]]:
    """Yields the pieces of all ranks' ranges that are moved at the same time."""
    for at in range(0, max(stop - first for first, stop in pairwise(bounds)), PIECE_NUMEL):
        yield [(min(first + at, stop), min(first + at + PIECE_NUMEL, stop)) for first, stop in pairwise(bounds)]


def _views(boxes: Sequence[Box], piece: torch.Tensor, first: int) -> Iterator[torch.Tensor]:
    for box in boxes:
        yield from box.views(piece, first)


def _count(boxes: Sequence[Box], element: int) -> int:
    return sum(box.count_before(element) for box in boxes)
