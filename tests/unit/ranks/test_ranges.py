"""Which elements of a vector a rank's boxes of its tensors have in a range."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest
import torch

from skerry.model.torch.shards import Box, Region
from skerry.ranks.ranges import plan_bounds
from skerry.v1 import exchange_pb2 as v1
from skerry.wire import FragmentLayout, TensorSpec
from skerry.wire.digests import LEAF_NUMEL


@pytest.mark.parametrize("seed", range(200))
def test_a_box_has_its_elements_of_a_range_in_the_vectors_order(seed: int) -> None:
    chosen = random.Random(seed)
    shape = tuple(chosen.randint(1, 5) for _ in range(chosen.randint(0, 4)))
    first = tuple(chosen.randrange(size) for size in shape)
    held = tuple(chosen.randint(1, size - start) for size, start in zip(shape, first, strict=True))
    numel, offset = math.prod(shape), chosen.randint(0, 9)
    box, vector = Box(offset, shape, Region(first, held)), torch.arange(offset + numel + chosen.randint(0, 9))
    own = vector[offset : offset + numel].view(shape)[box.region.slices].reshape(-1)
    for start in range(len(vector)):
        assert box.count_before(start) == int((own < start).sum())
        stop = chosen.randint(start, len(vector))
        found = [one.reshape(-1) for one in box.views(vector[start:stop], start)]
        expected = own[(own >= start) & (own < stop)]
        assert torch.equal(torch.cat([*found, torch.empty(0, dtype=torch.int64)]), expected)


@pytest.mark.parametrize(
    ("begins", "ranges"),
    [
        ([[0, 4, 8]], [(0, 4), (4, 8), (8, 9)]),
        ([[0, 2, 4, 6, 8], [0, 4, 8]], [(0, 4), (4, 8), (8, 9)]),
        ([[0, 4, 8], [0]], [(0, 9)]),
        ([[0, 2.5, 4]], [(0, 4), (4, 9)]),
        ([[4, 8, 9, 12]], [(0, 4), (4, 8), (8, 9)]),  # no syncer cuts like this
        ([[1.5]], [(0, 9)]),
    ],
)
def test_ranges_are_cut_where_every_version_of_a_plan_and_its_leaves_are(
    begins: list[list[float]], ranges: list[tuple[int, int]]
) -> None:
    layout = FragmentLayout("f", (TensorSpec("a", (9, LEAF_NUMEL)),))
    objects = [
        v1.PlanObject(version=version, first=int(first * LEAF_NUMEL))
        for version, firsts in enumerate(begins)
        for first in firsts
    ]
    for count in (1, 2, 3, 8):
        bounds = plan_bounds(layout, v1.PullPlan(objects=objects), count)
        assert (len(bounds), bounds[0], bounds[-1]) == (count + 1, 0, layout.numel)
        assert bounds == sorted(bounds)
        assert {bound / LEAF_NUMEL for bound in bounds} <= {edge for pair in ranges for edge in pair}
    finest = pairwise(plan_bounds(layout, v1.PullPlan(objects=objects), 64))
    assert [(first / LEAF_NUMEL, stop / LEAF_NUMEL) for first, stop in finest if first < stop] == ranges
