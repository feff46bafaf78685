"""The one attach stream of an island: the first rank's, which hands on to the others what it hears.

So the syncer sees one learner with one session, in whose name every rank pushes.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import aclosing
from typing import Any

from skerry.net.grpc_transport import GrpcTransport
from skerry.v1 import exchange_pb2 as v1


class RankTransport(GrpcTransport):
    """The connections of one rank."""

    def __init__(self, target: str, *, is_first: bool, **options: Any) -> None:
        super().__init__(target, **options)
        self._is_first = is_first
        self._sent_on: deque[bytes] = deque()
        self._heard: asyncio.Queue[bytes | None] = asyncio.Queue()

    def take_heard(self) -> list[bytes]:
        """Returns what the first rank has heard since the last call, for the others; for any thread."""
        return [self._sent_on.popleft() for _ in range(len(self._sent_on))]

    def hear(self, heard: Iterable[bytes]) -> None:
        """Takes, at another rank, what the first one has heard; on the event loop."""
        for response in heard:
            self._heard.put_nowait(response)

    async def attach(self, requests: AsyncIterator[v1.AttachRequest]) -> AsyncGenerator[v1.AttachResponse, None]:
        """As `Transport.attach`; at another rank than the first, what that hands on, and reports go nowhere."""
        if self._is_first:
            async with aclosing(super().attach(requests)) as responses:
                async for response in responses:
                    self._sent_on.append(response.SerializeToString())
                    yield response
            return
        reports = asyncio.ensure_future(self._until_leave(requests))
        try:
            while (heard := await self._heard.get()) is not None:
                yield v1.AttachResponse.FromString(heard)
        finally:
            reports.cancel()

    async def _until_leave(self, requests: AsyncIterator[v1.AttachRequest]) -> None:
        async for _ in requests:
            pass
        self._heard.put_nowait(None)
