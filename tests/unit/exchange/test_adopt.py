"""A plan's bytes, applied as they arrive, in whatever pieces."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from blake3 import blake3
from numpy.typing import NDArray

from skerry.errors import CorruptDownloadError
from skerry.exchange.adopt import PlanApplier
from skerry.v1 import exchange_pb2 as v1
from skerry.v1 import types_pb2 as types
from skerry.wire import Codec, Encoding, FragmentLayout, TensorSpec
from skerry.wire.digests import tree_digest
from skerry.wire.frames import encode_frames

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
            decoded = np.empty_like(update)
            for first, stop in pairwise((0, 160, LAYOUT.numel)):
                inside = slice(first, stop)
                frames = encode_frames(update[inside], LAYOUT, INT4, first=first, decoded=decoded[inside])
                self.data.append(b"".join(frames))
                self.objects.append(
                    v1.PlanObject(
                        name=f"{version}-{first}",
                        kind=v1.OBJECT_KIND_UPDATE,
                        version=version,
                        first=first,
                        numel=stop - first,
                        size_bytes=len(self.data[-1]),
                        digest=blake3(self.data[-1]).digest(),
                    )
                )
            self.weights -= decoded

    def applier(self, object_count: int, weights: NDArray[np.float32]) -> PlanApplier:
        """Returns an applier of the first objects, which lead from version 3 to these weights."""
        digest = tree_digest(weights)
        plan = v1.PullPlan(
            from_version=3,
            target=types.FragmentVersion(fragment="f", version=5, digest=digest),
            objects=self.objects[:object_count],
        )
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


def test_a_plan_that_leaves_a_part_out_does_not_lead_to_its_target() -> None:
    course = Course()
    applier = course.applier(1, course.weights)
    applier.feed(0, 0, course.data[0])
    with pytest.raises(CorruptDownloadError):
        applier.finish()


def test_a_whole_fragment_with_a_wrong_bit_is_refused_at_the_end() -> None:
    course = Course()
    wrong = course.weights.copy()
    wrong.view(np.uint32)[7] ^= 1
    applier = course.applier(4, wrong)
    for index, data in enumerate(course.data):
        applier.feed(index, 0, data)
    with pytest.raises(CorruptDownloadError, match="weights differ"):
        applier.finish()
