"""A push: its messages, its parallel calls, and when it is completed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from blake3 import blake3

from skerry.errors import TryAgainError, error_of
from skerry.exchange.push import Delta, cut_messages, encode_parts, push
from skerry.stats import Tally
from skerry.v1 import exchange_pb2 as v1
from skerry.wire import FragmentLayout, TensorSpec
from skerry.wire.digests import delta_digest
from skerry.wire.frames import encode_frames
from tests.support.scripted_transport import RAW, quick_calls

LAYOUT = FragmentLayout("f", (TensorSpec("w", (300,)),))
VALUES = np.arange(300, dtype=np.float32)
PARTS = encode_parts(encode_frames, VALUES.copy(), LAYOUT, RAW, 600)
DELTA = Delta(v1.PushHeader(delta_id="d", fragment="f"), PARTS)
DIGEST = delta_digest([(part.first, part.numel, part.digest) for part in PARTS])


class Calls:
    """Takes each call of a push message by message, in turns; calls of these numbers fail at their second message."""

    def __init__(self, *failing: int, stalls: bool = False) -> None:
        self.calls: list[list[v1.PushDeltaRequest]] = []
        self._failing = failing
        self._stalls = stalls

    async def push_delta(self, requests: AsyncIterator[v1.PushDeltaRequest]) -> v1.PushDeltaResponse:
        number = len(self.calls)
        received: list[v1.PushDeltaRequest] = []
        self.calls.append(received)
        async for request in requests:
            received.append(request)
            if self._stalls:
                await asyncio.Event().wait()
            if number in self._failing and len(received) == 2:
                raise error_of("UNREACHABLE", "cut")
            await asyncio.sleep(0)
        return v1.PushDeltaResponse(state=v1.PUSH_STATE_ACCEPTED, position=len(self.calls))

    async def pushed(self, *, stored: Any = (), is_repeated: bool = False, **rules: Any) -> int:
        """Pushes the delta and returns how many bytes of frames went out."""
        tally, calls = Tally(), quick_calls(self, **rules)
        await push(calls, DELTA, seen_position=4, stored=stored, tally=tally, is_repeated=is_repeated)
        return tally.bytes_up

    def completed(self) -> list[int]:
        """The calls that completed the push, by number."""
        return [number for number, call in enumerate(self.calls) if call[-1].HasField("complete")]

    def parts(self) -> list[tuple[int, int]]:
        """The parts that all calls sent to their ends."""
        return sorted(
            (request.part.first, request.part.numel)
            for call in self.calls
            for request in call
            if request.HasField("part")
        )


SPANS = [(part.first, part.numel) for part in PARTS]


def test_parts_cover_the_fragment_and_have_the_digest_of_their_numbers() -> None:
    assert len(PARTS) > 2
    assert [first for first, _ in SPANS[1:]] == [first + numel for first, numel in SPANS[:-1]]
    assert SPANS[-1][0] + SPANS[-1][1] == 300
    for part in PARTS:
        digest = blake3()
        inside = slice(part.first, part.first + part.numel)
        frames = b"".join(encode_frames(VALUES[inside], LAYOUT, RAW, first=part.first, digest=digest))
        assert (b"".join(part.frames), part.digest) == (frames, digest.digest())


async def test_a_small_delta_is_one_call_of_header_parts_and_end() -> None:
    calls = Calls()
    sent = await calls.pushed()
    (call,) = calls.calls
    assert (call[0].header.delta_id, call[0].header.seen_position) == ("d", 4)
    assert calls.parts() == SPANS
    assert sent == sum(len(frame) for part in PARTS for frame in part.frames)
    assert call[-1].complete.digest == DIGEST
    assert DELTA.header.seen_position == 0


async def test_parts_that_the_syncer_has_are_not_sent_again() -> None:
    calls = Calls()
    await calls.pushed(stored={(part.first, part.numel, part.digest) for part in PARTS[1:]})
    assert calls.parts() == SPANS[:1]
    assert calls.calls[0][-1].complete.digest == DIGEST


@pytest.mark.parametrize(("is_repeated", "call_count"), [(False, 3), (True, 1)])
async def test_a_large_delta_is_spread_over_calls_unless_it_is_repeated(is_repeated: bool, call_count: int) -> None:
    calls = Calls()
    await calls.pushed(lane_bytes=500, is_repeated=is_repeated)
    assert len(calls.calls) == call_count
    assert calls.parts() == SPANS
    assert calls.completed() == [0]


@pytest.mark.parametrize("failing", [0, 1, 2])
async def test_where_a_call_fails_the_others_bring_what_they_can_and_nothing_is_completed(failing: int) -> None:
    calls = Calls(failing)
    with pytest.raises(TryAgainError, match="cut"):
        await calls.pushed(lane_bytes=500)
    assert calls.completed() == []
    assert calls.parts() == SPANS


async def test_a_push_that_stands_still_is_given_up() -> None:
    with pytest.raises(TryAgainError) as given_up:
        await Calls(stalls=True).pushed(stall_timeout_s=0.01)
    assert given_up.value.reason == "TIMEOUT"


def test_frames_are_cut_into_messages_of_one_size() -> None:
    assert list(cut_messages([b"abc", b"", b"defgh", b"ij"], 4)) == [b"abcd", b"efgh", b"ij"]
    assert list(cut_messages([])) == []
