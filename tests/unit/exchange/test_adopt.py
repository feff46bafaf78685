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


class Course:
    """Versions 3 to 5 of a fragment: what two updates make of version 3, each in two objects."""

    def __init__(self) -> None:
        numbers = np.random.default_rng(1)
        self.start = numbers.standard_normal(LAYOUT.numel).astype(np.float32)
        self.data: list[bytes] = []
        self.objects: list[v1.PlanObject] = []
        self.weights = self.start.copy()
        for version in (4, 5):
            update = numbers.standard_normal(LAYOUT.numel).astype(np.float32)
            for first, stop in pairwise((0, 160, LAYOUT.numel)):
                described, data = update_object(LAYOUT, version, update[first:stop], first=first, encoding=INT4)
                self.objects.append(described)
                self.data.append(data)
            self.weights -= update

    def applier(self, object_count: int, weights: NDArray[np.float32]) -> PlanApplier:
        """Returns an applier of the first objects, which lead from version 3 to these weights."""
        plan = plan_to(LAYOUT, 5, tree_digest(weights), self.objects[:object_count], from_version=3)
        return PlanApplier(LAYOUT, plan, self.start)


@pytest.mark.parametrize("size", [1, 50, 10_000])
def test_updates_in_several_objects_and_pieces_lead_to_the_target_and_leave_the_start_alone(size: int) -> None:
    course = Course()
    before, applier = course.start.copy(), course.applier(4, course.weights)
    for index, data in enumerate(course.data):
        for offset in range(0, len(data), size):
            applier.feed(index, offset, data[offset : offset + size])
    np.testing.assert_array_equal(applier.finish().view(np.uint32), course.weights.view(np.uint32))
    np.testing.assert_array_equal(course.start, before)


def test_an_empty_plan_leads_to_what_the_learner_has() -> None:
    course = Course()
    np.testing.assert_array_equal(course.applier(0, course.start).finish(), course.start)


@pytest.mark.parametrize("wrong", ["a part that is missing", "a bit"])
def test_weights_that_are_not_the_targets_are_refused_at_the_end(wrong: str) -> None:
    course = Course()
    if wrong == "a bit":
        course.weights.view(np.uint32)[7] ^= 1
    applier = course.applier(4 if wrong == "a bit" else 1, course.weights)
    for index in range(len(applier.plan.objects)):
        applier.feed(index, 0, course.data[index])
    with pytest.raises(CorruptDownloadError, match="weights differ"):
        applier.finish()
