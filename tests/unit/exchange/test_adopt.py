"""A plan's bytes, applied as they arrive, in whatever pieces."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from numpy.typing import NDArray

from skerry.errors import CorruptDownloadError
from skerry.exchange.adopt import PlanApplier
from skerry.v1 import exchange_pb2 as v1
from skerry.wire import Codec, Encoding, FragmentLayout, TensorSpec
from skerry.wire.digests import tree_digest
from tests.support.scripted_transport import plan_to, update_object

LAYOUT = FragmentLayout("f", (TensorSpec("a", (30, 8)), TensorSpec("b", (7,)), TensorSpec("c", (20, 8))))
INT4 = Encoding(Codec.INT4, block=8)


# What two updates, each in two objects, make of version 3.
NUMBERS = np.random.default_rng(1)
START = NUMBERS.standard_normal(LAYOUT.numel).astype(np.float32)
UPDATES = [NUMBERS.standard_normal(LAYOUT.numel).astype(np.float32) for _ in range(2)]
OBJECTS = [
    update_object(LAYOUT, version, update[first:stop], first=first, encoding=INT4)
    for version, update in enumerate(UPDATES, 4)
    for first, stop in pairwise((0, 160, LAYOUT.numel))
]
WEIGHTS = START - UPDATES[0] - UPDATES[1]


def plan_with(weights: NDArray[np.float32], object_count: int) -> v1.PullPlan:
    """Returns a plan of the first objects, which is said to lead from version 3 to these weights."""
    objects = [described for described, _ in OBJECTS[:object_count]]
    return plan_to(LAYOUT, 5, tree_digest(weights), objects, from_version=3)


def applied(weights: NDArray[np.float32], object_count: int, size: int = 10_000) -> NDArray[np.float32]:
    """Returns what that plan and its objects, in pieces of that size, make of version 3."""
    applier = PlanApplier(LAYOUT, plan_with(weights, object_count), START)
    for index, (_, data) in enumerate(OBJECTS[:object_count]):
        for offset in range(0, len(data), size):
            applier.feed(index, offset, data[offset : offset + size])
    return applier.finish()


@pytest.mark.parametrize("size", [1, 50, 10_000])
def test_updates_in_several_objects_and_pieces_lead_to_the_target_and_leave_the_start_alone(size: int) -> None:
    before = START.copy()
    np.testing.assert_array_equal(applied(WEIGHTS, 4, size).view(np.uint32), WEIGHTS.view(np.uint32))
    np.testing.assert_array_equal(START, before)


def test_an_empty_plan_leads_to_what_the_learner_has() -> None:
    np.testing.assert_array_equal(applied(START, 0), START)


def test_weights_that_are_not_the_targets_are_refused_at_the_end() -> None:
    other = WEIGHTS.copy()
    other.view(np.uint32)[7] ^= 1
    for weights, object_count in ((WEIGHTS, 1), (other, 4)):
        with pytest.raises(CorruptDownloadError, match="weights differ"):
            applied(weights, object_count)
