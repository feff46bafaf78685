"""Streams of events are bounded: a slow follower's stream ends with TOO_SLOW, and others are not affected."""

from __future__ import annotations

import pytest

from skerry.v1.types_pb2 import Event, RoundOpened
from skerry_syncer.errors import SyncerError
from skerry_syncer.run.events import EventStream


def _event(position: int) -> Event:
    return Event(position=position, round_opened=RoundOpened(fragment="body", version=position))


async def test_an_end_comes_after_what_is_queued() -> None:
    stream = EventStream(2**20)
    stream.put(_event(1))
    stream.end()
    stream.put(_event(2))
    assert await stream.get() == _event(1)
    assert await stream.get() is None


async def test_the_first_end_counts() -> None:
    stream = EventStream(2**20)
    stream.end(SyncerError("SESSION_FENCED", "a newer session attached"))
    stream.end()
    with pytest.raises(SyncerError, match="newer session"):
        await stream.get()


async def test_a_follower_that_is_too_slow_is_told_so() -> None:
    stream = EventStream(10_000)
    for position in range(1000):
        stream.put(_event(position))
    with pytest.raises(SyncerError) as caught:
        await stream.get()
    assert caught.value.reason == "TOO_SLOW"
    assert caught.value.retry_after_s is not None


async def test_a_follower_that_keeps_up_is_never_dropped() -> None:
    stream = EventStream(10_000)
    for position in range(1000):
        stream.put(_event(position))
        assert await stream.get() == _event(position)


async def test_what_is_skipped_takes_no_room_and_an_end_is_not_skipped() -> None:
    stream = EventStream(10_000)
    for position in range(1000):
        stream.put(_event(position))
        stream.skip()
    stream.put(_event(1000))
    assert await stream.get() == _event(1000)
    stream.end(SyncerError("SESSION_FENCED", "a newer session attached"))
    stream.skip()
    with pytest.raises(SyncerError, match="newer session"):
        await stream.get()
