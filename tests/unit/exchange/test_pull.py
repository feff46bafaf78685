"""Downloads of a version by two updates: what they lead to, and what is asked again where a call breaks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from skerry.errors import CorruptDownloadError, error_of
from skerry.exchange.pull import pull_newest
from skerry.v1 import exchange_pb2 as v1
from skerry.wire import FragmentLayout, TensorSpec
from skerry.wire.digests import tree_digest
from tests.support.scripted_transport import ScriptedTransport, plan_to, quick_calls, scripted_session, update_object

LAYOUT = FragmentLayout("f", (TensorSpec("w", (4,)),))
START = np.array([1, 2, 3, 4], np.float32)  # version 3
TARGET = np.array([0.5, 1, 3, 1], np.float32)
(FOUR, FOUR_DATA), (FIVE, FIVE_DATA) = (
    update_object(LAYOUT, version, np.array(update, np.float32))
    for version, update in ((4, [0.5, 0, -1, 2]), (5, [0, 1, 1, 1]))
)
OBJECTS = [FOUR_DATA, FIVE_DATA]


def plan(digest: bytes) -> v1.PullFragmentResponse:
    """Returns the plan from version 3 to version 5."""
    return v1.PullFragmentResponse(plan=plan_to(LAYOUT, 5, digest, [FOUR, FIVE], from_version=3))


def syncer(
    *, breaks_after: int | None = None, digest: bytes = b""
) -> Callable[[v1.PullFragmentRequest], Iterator[Any]]:
    """Returns a call's script: the plan, then bytes from the place that is asked for, 7 at a time, up to the limit."""

    def answer(request: v1.PullFragmentRequest) -> Iterator[Any]:
        yield plan(digest or tree_digest(TARGET))
        index, offset = request.resume.object_index, request.resume.offset
        left = request.limit_bytes or 10**6
        sent_count = 0
        while index < len(OBJECTS) and left > 0:
            if sent_count == breaks_after:
                yield error_of("UNREACHABLE", "the link broke")
            data = OBJECTS[index][offset : offset + min(7, left)]
            yield v1.PullFragmentResponse(data=v1.PullData(object_index=index, offset=offset, data=data))
            sent_count, left, offset = sent_count + 1, left - len(data), offset + len(data)
            if offset >= len(OBJECTS[index]):
                index, offset = index + 1, 0

    return answer


async def pulled(calls: list[Any], **rules: Any) -> tuple[Any, list[v1.PullFragmentRequest], int]:
    """Returns what a pull from version 3 gives, the requests that it made, and the bytes that it received."""
    transport = ScriptedTransport(pull_fragment=calls)
    session = scripted_session(quick_calls(transport, **rules), {"w": START.copy()})
    try:
        result: Any = await pull_newest(session, LAYOUT, version=3, weights=START)
    except CorruptDownloadError as error:
        result = error
    return result, [request for _, request in transport.asked], session.tally.bytes_down


async def test_updates_are_subtracted_in_their_order_from_the_weights_that_the_caller_has() -> None:
    version, requests, received = await pulled([syncer()])
    np.testing.assert_array_equal(version.weights, TARGET)
    assert version.version == 5
    np.testing.assert_array_equal(START, [1, 2, 3, 4])
    assert [(request.from_version, request.is_newest) for request in requests] == [(3, True)]
    assert received == sum(map(len, OBJECTS))


async def test_a_call_that_breaks_is_followed_by_one_for_the_rest() -> None:
    version, requests, received = await pulled([syncer(breaks_after=2), syncer()], lane_bytes=10**6)
    np.testing.assert_array_equal(version.weights, TARGET)
    assert [(request.resume.object_index, request.resume.offset) for request in requests] == [(0, 0), (0, 0)]
    version, requests, received = await pulled([syncer(breaks_after=2)] * 20, lane_bytes=14)
    np.testing.assert_array_equal(version.weights, TARGET)
    assert received == sum(map(len, OBJECTS))


@pytest.mark.parametrize("lane_count", [1, 2, 4])
async def test_stretches_of_objects_are_fetched_by_calls_of_their_own(lane_count: int) -> None:
    version, requests, received = await pulled([syncer()] * 20, lane_bytes=20, lane_count=lane_count)
    np.testing.assert_array_equal(version.weights, TARGET)
    sizes = [len(data) for data in OBJECTS]
    places = [(index, start) for index, size in enumerate(sizes) for start in range(0, size, 20)]
    assert sorted((request.resume.object_index, request.resume.offset) for request in requests) == places
    assert received == sum(sizes)


async def test_weights_without_the_digest_that_was_announced_are_asked_for_as_a_whole_and_refused() -> None:
    error, requests, _ = await pulled([syncer(digest=b"another")] * 3, lane_bytes=10**6)
    assert isinstance(error, CorruptDownloadError)
    assert [request.limit_bytes for request in requests] == [10**6, 0, 0]


async def test_an_object_that_is_said_to_be_larger_than_memory_is_refused_where_it_ends() -> None:
    def answer(request: v1.PullFragmentRequest) -> Iterator[v1.PullFragmentResponse]:
        exaggerated = plan(tree_digest(TARGET))
        exaggerated.plan.objects[0].size_bytes = 2**62
        for response in syncer()(request):
            yield exaggerated if response.HasField("plan") else response

    error, requests, _ = await pulled([answer] * 50, lane_bytes=20)
    assert isinstance(error, CorruptDownloadError)
    assert len(requests) < 50


async def test_bytes_without_a_plan_are_refused() -> None:
    error, _, _ = await pulled([lambda _: [v1.PullFragmentResponse(data=v1.PullData(data=OBJECTS[0]))]] * 3)
    assert isinstance(error, CorruptDownloadError)
