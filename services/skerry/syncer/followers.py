"""Bounded streams of a run's events, one a follower: a slow follower costs the syncer neither time nor memory."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Final

from skerry.syncer.errors import SyncerError
from skerry.v1.types_pb2 import Event

# Memory that a queued event takes beside its own bytes, roughly: followers share the message.
_OVERHEAD_BYTES: Final = 512


class EventStream:
    """A queue of events for one follower, bounded in bytes; `put` never blocks, and an ended stream has a reason."""

    def __init__(self, limit_bytes: int) -> None:
        """Holds up to `limit_bytes` of events that were not taken yet."""
        self._limit_bytes = limit_bytes
        self._size_bytes = 0
        self._events: deque[Event] = deque()
        self._end: Exception | None = None
        self._has_ended = False
        self._has_news = asyncio.Event()

    def put(self, event: Event) -> None:
        """Adds an event; if the queue grows past its bound, the stream ends with TOO_SLOW."""
        if self._has_ended:
            return
        self._size_bytes += _size_bytes(event)
        self._events.append(event)
        self._has_news.set()
        if self._size_bytes > self._limit_bytes:
            self._events.clear()
            self.end(
                SyncerError(
                    "TOO_SLOW",
                    "events were not read as fast as they happen; follow again from the last position seen. "
                    f"limit_bytes={self._limit_bytes}",
                    retry_after_s=1.0,
                )
            )

    def end(self, error: Exception | None = None) -> None:
        """Ends the stream after the queued events, with `error` or normally; only the first call has an effect."""
        if not self._has_ended:
            self._has_ended, self._end = True, error
            self._has_news.set()

    async def get(self) -> Event | None:
        """Returns the next event, or None when the stream has ended normally.

        Raises:
            SyncerError: the stream ended with this error; likewise any other error that ended it.
        """
        while not self._events:
            if self._end is not None:
                raise self._end
            if self._has_ended:
                return None
            self._has_news.clear()
            await self._has_news.wait()
        event = self._events.popleft()
        self._size_bytes -= _size_bytes(event)
        return event


def _size_bytes(event: Event) -> int:
    return _OVERHEAD_BYTES + event.ByteSize()


@dataclass(eq=False)
class _Follower:
    """One stream and the learner and session that it belongs to; both are empty for an observer."""

    stream: EventStream
    learner: str
    session: str


class Followers:
    """All followers of one run on one replica: attached learners and observers."""

    def __init__(self, limit_bytes: int) -> None:
        """Gives each follower a stream of at most `limit_bytes`."""
        self._limit_bytes = limit_bytes
        self._followers: dict[_Follower, None] = {}
        self._closed: Exception | None = None

    def __len__(self) -> int:
        return len(self._followers)

    @contextmanager
    def following(self, learner: str = "", session: str = "") -> Iterator[EventStream]:
        """Yields a stream of the events that are sent inside the context, to a learner's session or to an observer."""
        follower = _Follower(EventStream(self._limit_bytes), learner, session)
        self._followers[follower] = None
        if self._closed is not None:
            follower.stream.end(self._closed)
        try:
            yield follower.stream
        finally:
            del self._followers[follower]

    def send(self, event: Event) -> None:
        """Queues the event for every follower; events about learners go to observers only."""
        for follower in self._followers:
            if not (follower.learner and event.HasField("learner")):
                follower.stream.put(event)

    def end(self, error: Exception, *, learner: str = "", but_session: str = "") -> None:
        """Ends all streams, or those of a learner's sessions other than `but_session`."""
        for follower in self._followers:
            if not learner or (follower.learner == learner and follower.session != but_session):
                follower.stream.end(error)

    def close(self, error: Exception) -> None:
        """Ends all streams, and every stream that is opened later."""
        self._closed = error
        self.end(error)


@asynccontextmanager
async def running(work: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """Runs `work`, which must not raise, beside the context and cancels it at the context's end."""
    # A task group would wrap the context's own errors, and would raise in a generator's caller between two items.
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
