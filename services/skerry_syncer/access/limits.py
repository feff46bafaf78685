"""What one client may take of a syncer: all limits, far above what honest clients need.

They bound what a client costs the others by a mistake. The number of connections is for a proxy to bound, as
`docker/haproxy.cfg` does. Each replica counts for itself.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from skerry_syncer.errors import RETRY_STORE_S, SyncerError

# Of one message: the default of every gRPC implementation.
MAX_MESSAGE_BYTES: Final = 4 * 2**20
# Streams of one connection; learners have a handful.
MAX_STREAMS: Final = 128
# Of pushed parts until they are durable and pieces of downloads until they are sent, of all clients together: 128 parts
# of the suggested size.
IN_FLIGHT_BYTES: Final = 2**29
# The least rate at which a client sends or reads what is held in memory for it, 64 kbit/s, and the time that it may
# take beyond that: four transfers at once on a slow line take longer than one.
LEAST_BYTES_A_SECOND: Final = 8 * 2**10
GRACE_S: Final = 20.0
# For a call's first message. Clients of this project wait for 20 s for a whole call.
FIRST_MESSAGE_S: Final = 30.0
# Calls that a client may begin, and messages that it may send but for weights, in a second and at once. What has many
# bytes counts as more: an answer with 60,000 tensors has 3 MB and takes 20 ms to make. So does to follow a run, which
# begins with all that is known of it.
CALLS_A_SECOND: Final = 200
CALLS_AT_ONCE: Final = 600
BYTES_A_CALL: Final = 2**13
FOLLOWING_CALLS: Final = 10
# How long a call may wait for its turn before it is refused. A refused one waits too: a connection has few streams, so
# a client that repeats refused calls is slowed down.
MAX_DELAY_S: Final = 1.0
# Clients that are remembered, those that called last.
MAX_KNOWN: Final = 1024


def patience_s(size_bytes: int) -> float:
    """Returns for how long the syncer waits for so many bytes to come, or to be read."""
    return GRACE_S + size_bytes / LEAST_BYTES_A_SECOND


@asynccontextmanager
async def within(timeout_s: float, message: str) -> AsyncIterator[None]:
    """Gives a client so long.

    Raises:
        SyncerError: TOO_SLOW, with this message.
    """
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError:
        raise SyncerError("TOO_SLOW", message, retry_after_s=RETRY_STORE_S) from None


class Allowance:
    """The token bucket of one client, for the tasks of one event loop; a token is a call or a message."""

    def __init__(self) -> None:
        """Begins full."""
        self._empty_until_s = -math.inf

    def spend(self, size_bytes: int) -> None:
        """Takes the tokens of a message that has come or is about to go; what comes next waits for them."""
        self._take(size_bytes // BYTES_A_CALL)

    async def take(self, count: int = 1) -> None:
        """Takes so many tokens, and returns when they are there.

        Raises:
            SyncerError: QUOTA_EXCEEDED: that would take longer than `MAX_DELAY_S`.
        """
        wait_s = self._empty_until_s - asyncio.get_running_loop().time()
        if wait_s <= MAX_DELAY_S:
            self._take(count)
        if wait_s > 0:
            await asyncio.sleep(min(wait_s, MAX_DELAY_S))
        if wait_s > MAX_DELAY_S:
            message = f"the client calls too often. limit={CALLS_A_SECOND} calls a second"
            raise SyncerError("QUOTA_EXCEEDED", message, retry_after_s=wait_s - MAX_DELAY_S)

    def _take(self, count: int) -> None:
        now_s = asyncio.get_running_loop().time()
        full_s = now_s - CALLS_AT_ONCE / CALLS_A_SECOND
        self._empty_until_s = max(self._empty_until_s, full_s) + count / CALLS_A_SECOND
