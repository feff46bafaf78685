"""What one client may take, by its identity. The defaults are far above what honest ones need.

Without roles all clients are one. Each replica counts for itself.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final
from weakref import WeakValueDictionary

from google.protobuf.message import DecodeError, Message

from skerry.runtime.clock import Clock
from skerry_syncer.errors import RETRY_STORE_S, SyncerError, bad_request

# What a client may take beyond the time at the least rate, 64 kbit/s, to send or to read what is held in memory for it:
# four transfers at once on a slow line take longer than one.
GRACE_S: Final = 20.0
LEAST_BYTES_A_SECOND: Final = 8 * 2**10
# Time for a call's first or only message to arrive. Clients of this project wait for 20 s for a whole call.
FIRST_MESSAGE_S: Final = 30.0
# Calls of one client that may wait for it at the same time, since gRPC holds an incomplete message in memory.
MOST_ARRIVING: Final = 8
# Calls of health and reflection from one address: a learner watches over each of its connections, a proxy for many.
MOST_FOREIGN_CALLS: Final = 1024
# Calls of one identity that are under way: a learner of a hundred processes has some hundreds.
MOST_CALLS: Final = 1024
_CALLS_RETRY_S: Final = RETRY_STORE_S
# Unary calls that one client may make in a second; it may make those of the second number of seconds at once. A message
# of `LEAST_MESSAGE_BYTES` or more, unless it has weights, counts as one more call for each `MESSAGE_BYTES`: an answer
# with 60,000 tensors is 3 MB and takes 20 ms to make, and 4 MiB of empty entries take 100 ms to parse.
SHORT_CALLS_A_SECOND: Final = 100.0
SHORT_CALLS_BURST_S: Final = 3.0
MESSAGE_BYTES: Final = 2**13
LEAST_MESSAGE_BYTES: Final = 2**10
# Messages to health and reflection from one address at once, and the pause between further ones.
FOREIGN_BURST: Final = 1024
FOREIGN_PAUSE_S: Final = 0.02
# An unused rate is credited for up to the first of these; pauses shorter than the second are not worth a timer.
_RATE_BURST_S: Final = 0.02
_RATE_PAUSE_S: Final = 0.005
# A rate forgets clients that it would let through anyway when it knows so many.
_MOST_KNOWN: Final = 1024


def patience_s(size_bytes: int) -> float:
    """Returns for how long the syncer waits for so many bytes to come, or to be read."""
    return GRACE_S + size_bytes / LEAST_BYTES_A_SECOND


class Rate:
    """Allows each client a number of actions at once, and further ones after a pause each."""

    def __init__(self, what: str, clock: Clock, *, burst: int, pause_s: float) -> None:
        """`what` is in the refusals."""
        self._what = what
        self._clock = clock
        self._burst_s = (burst - 1) * pause_s
        self._pause_s = pause_s
        self._paid_until_s: dict[str, float] = {}

    def take(self, client: str, count: int = 1) -> None:
        """Counts so many.

        Raises:
            SyncerError: QUOTA_EXCEEDED: it comes too soon.
        """
        now_s = self._clock.monotonic_s()
        paid_s = max(now_s, self._paid_until_s.get(client, now_s))
        early_s = paid_s - now_s - self._burst_s
        if early_s > 0:
            raise exceeded(f"too many {self._what} at once", retry_after_s=early_s)
        self.charge(client, count)

    def is_due(self, client: str) -> bool:
        """Counts one if it does not come too soon, and says whether it did."""
        try:
            self.take(client)
        except SyncerError:
            return False
        return True

    def charge(self, client: str, count: int) -> None:
        """Counts so many that have happened, however soon; those that follow wait for them."""
        now_s = self._clock.monotonic_s()
        self._paid_until_s[client] = max(now_s, self._paid_until_s.get(client, now_s)) + count * self._pause_s
        if len(self._paid_until_s) > _MOST_KNOWN:
            self._paid_until_s = {one: until_s for one, until_s in self._paid_until_s.items() if until_s > now_s}


class Calls:
    """Counts the calls that are under way, by client."""

    def __init__(self, most: int = MOST_CALLS, what: str = "calls") -> None:
        """Admits `most` of each client; `what` is in the refusals."""
        self._most = most
        self._what = what
        self._count: Counter[str] = Counter()

    @contextmanager
    def under_way(self, client: str) -> Iterator[None]:
        """Counts a call as long as the context lasts.

        Raises:
            SyncerError: QUOTA_EXCEEDED.
        """
        if self._count[client] >= self._most:
            raise exceeded(f"too many {self._what} are under way. limit={self._most}", retry_after_s=_CALLS_RETRY_S)
        self._count[client] += 1
        try:
            yield
        finally:
            self._count[client] -= 1
            if not self._count[client]:
                del self._count[client]


class Arrivals:
    """Lets few calls of each client receive their first message at a time; gRPC reads nothing of the others."""

    def __init__(self) -> None:
        """Starts without clients."""
        self._turns = WeakValueDictionary[str, asyncio.Semaphore]()

    @asynccontextmanager
    async def awaiting(self, client: str) -> AsyncIterator[None]:
        """Awaits the client's turn; the message has to be received within the context.

        Raises:
            SyncerError: TOO_SLOW: that takes too long.
        """
        turns = self._turns.setdefault(client, asyncio.Semaphore(MOST_ARRIVING))
        try:
            async with asyncio.timeout(FIRST_MESSAGE_S), turns:
                yield
        except TimeoutError:
            raise SyncerError(
                "TOO_SLOW",
                f"the call's first message did not come within {FIRST_MESSAGE_S:.0f} s",
                retry_after_s=RETRY_STORE_S,
            ) from None


# Looks at a message; raises SyncerError where it is refused.
Check = Callable[[Any], None]
# Stands for a message that can't be parsed, until it can be refused.
_MALFORMED: Final = object()


@dataclass(frozen=True)
class _Oversized:
    """Stands for a message above the limit, until it can be refused."""

    size_bytes: int
    limit_bytes: int


def bounded(deserializer: Callable[[bytes], Any], limit_bytes: int) -> Callable[[bytes], Any]:
    """Returns a deserializer that parses no message above the limit, and never fails."""

    def parsed(data: bytes) -> Any:
        try:
            return deserializer(data) if len(data) <= limit_bytes else _Oversized(len(data), limit_bytes)
        except DecodeError:
            return _MALFORMED

    return parsed


def anything(_: Any) -> None:
    """Admits any message."""


def admitted(request: Any, check: Check) -> Any:
    """Returns the request.

    Raises:
        SyncerError: TOO_LARGE: it was above the limit; BAD_REQUEST: it was no protobuf message of its type; or as
            `check` raises.
    """
    if request is _MALFORMED:
        raise bad_request("message can't be parsed; is it a protobuf message of the method's type?")
    if isinstance(request, _Oversized):
        raise SyncerError(
            "TOO_LARGE", f"message is too large. limit_bytes={request.limit_bytes}, size_bytes={request.size_bytes}"
        )
    check(request)
    return request


@dataclass
class _Line:
    """The calls of one client, which take turns."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    free_s: float = -math.inf  # when what was taken so far may have passed

    def is_needed(self, since_s: float) -> bool:
        return self.lock.locked() or self.free_s > since_s


class Turns:
    """Lets one of each client's calls take a step in each pass of the event loop, however many it has.

    A step copies up to half a megabyte. With 32 downloads of one client in each pass, another learner got 2 merges a
    second instead of 19. Where a rate is given, a step takes the time of what it costs, and the client's other calls
    wait for it.
    """

    def __init__(self, rate: float = math.inf, *, burst_s: float = _RATE_BURST_S) -> None:
        """Starts without clients; what costs no more than `burst_s` of the rate may pass at once."""
        self._rate = rate
        self._burst_s = burst_s
        self._lines: dict[str, _Line] = {}

    async def take(self, client: str, cost: float = 0) -> None:
        """Returns when it is the turn of this call of the client, and what it costs may pass."""
        line = self._lines.setdefault(client, _Line())
        async with line.lock:
            now_s = asyncio.get_running_loop().time()
            if len(self._lines) > _MOST_KNOWN:
                since_s = now_s - self._burst_s
                self._lines = {one: it for one, it in self._lines.items() if it is line or it.is_needed(since_s)}
            self.charge(client, cost)
            await asyncio.sleep(line.free_s - now_s if line.free_s > now_s + _RATE_PAUSE_S else 0)

    def charge(self, client: str, cost: float) -> None:
        """Has the client's next calls wait until what has passed already may pass."""
        line = self._lines.setdefault(client, _Line())
        line.free_s = max(line.free_s, asyncio.get_running_loop().time() - self._burst_s) + cost / self._rate

    async def pay(self, client: str, message: Message) -> None:
        """Returns when a message that came may have passed; at once where nothing is bounded."""
        if self._rate < math.inf:
            await self.take(client, message.ByteSize())


def exceeded(message: str, *, retry_after_s: float) -> SyncerError:
    """Returns the error for a client that takes more than its share."""
    return SyncerError("QUOTA_EXCEEDED", message, retry_after_s=retry_after_s)
