"""Bounded streams that carry a run's events to its followers, so that no follower can hold up or bloat the syncer."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Final

from skerry.syncer.errors import SyncerError
from skerry.syncer.events import Event, FatesDecided, LearnerSeen, RolledBack, RoundClosed, VersionCommitted

# What one event, and each thing that it names, takes in a queue at most; streams are bounded by the sum.
_EVENT_BYTES: Final = 512
_NAMED_BYTES: Final = 384


def _size_bytes(event: Event) -> int:
    match event.kind:
        case RoundClosed(deltas=deltas):
            return _EVENT_BYTES + _NAMED_BYTES * len(deltas)
        case VersionCommitted(merged=merged):
            return _EVENT_BYTES + _NAMED_BYTES * len(merged)
        case FatesDecided(fates=fates):
            return _EVENT_BYTES + _NAMED_BYTES * len(fates)
        case RolledBack(versions=versions):
            return _EVENT_BYTES + _NAMED_BYTES * len(versions)
        case LearnerSeen(learner=learner) if learner.report is not None:
            return _EVENT_BYTES + _NAMED_BYTES * len(learner.report.adopted)
        case _:
            return _EVENT_BYTES


class EventStream:
    """A queue of events for one follower: never blocks who tells, is bounded in bytes, and ends with a reason."""

    def __init__(self, limit_bytes: int) -> None:
        """Holds up to `limit_bytes` of events that were not yet taken."""
        self._limit_bytes = limit_bytes
        self._size_bytes = 0
        self._events: deque[Event] = deque()
        self._end: Exception | None = None
        self._has_ended = False
        self._has_news = asyncio.Event()

    def put(self, event: Event) -> None:
        """Adds an event; a follower that is too slow for the bound is told so, and its stream ends."""
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
                    "events were not taken as fast as they happen; follow again from the last position seen. "
                    f"limit_bytes={self._limit_bytes}",
                    retry_after_s=1.0,
                )
            )

    def end(self, error: Exception | None = None) -> None:
        """Ends the stream after what is queued, with `error` or in peace; the first end counts."""
        if not self._has_ended:
            self._has_ended, self._end = True, error
            self._has_news.set()

    async def get(self) -> Event | None:
        """Returns the next event; None: the stream ended in peace.

        Raises:
            SyncerError: why the stream ended, or whatever else ended it.
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


@dataclass(eq=False)
class _Follower:
    """One stream; a learner's knows whose it is."""

    stream: EventStream
    learner: str
    session: str


class Followers:
    """Everybody who follows one run on one replica: attached learners and observers."""

    def __init__(self, limit_bytes: int) -> None:
        """Gives each of them a stream of at most `limit_bytes`."""
        self._limit_bytes = limit_bytes
        self._followers: dict[_Follower, None] = {}
        self._closed: Exception | None = None

    def __len__(self) -> int:
        return len(self._followers)

    @contextmanager
    def following(self, learner: str = "", session: str = "") -> Iterator[EventStream]:
        """Yields a stream of what is told while the context lasts; one of a learner, or of an observer."""
        follower = _Follower(EventStream(self._limit_bytes), learner, session)
        self._followers[follower] = None
        if self._closed is not None:
            follower.stream.end(self._closed)
        try:
            yield follower.stream
        finally:
            del self._followers[follower]

    def tell(self, event: Event) -> None:
        """Tells everybody at once; how learners fare is for observers only."""
        for follower in self._followers:
            if not (follower.learner and isinstance(event.kind, LearnerSeen)):
                follower.stream.put(event)

    def end(self, error: Exception, *, learner: str = "", but_session: str = "") -> None:
        """Ends all streams, or those of a learner's other sessions."""
        for follower in self._followers:
            if not learner or (follower.learner == learner and follower.session != but_session):
                follower.stream.end(error)

    def close(self, error: Exception) -> None:
        """Ends all streams, and those that are yet to come."""
        self._closed = error
        self.end(error)


@asynccontextmanager
async def running(work: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """Runs `work`, which must not raise, beside the context and cancels it at the context's end."""
    # No task group: it would wrap what the context raises, and would raise in a generator's caller between two items.
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
