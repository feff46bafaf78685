"""The one attach stream of an island: the first rank's, which hands on to the others what it hears.

So the syncer sees one learner with one session, in whose name every rank pushes.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from contextlib import aclosing
from typing import Any

from skerry.net.grpc_transport import GrpcTransport
from skerry.stats import Stats
from skerry.v1 import exchange_pb2 as v1
from skerry.v1 import types_pb2


class RankTransport(GrpcTransport):
    """The connections of one rank."""

    def __init__(self, target: str, *, others: Callable[[], Sequence[Stats]] | None, **options: Any) -> None:
        """The first rank is given what returns the other ranks' statistics, for its reports are of all ranks."""
        super().__init__(target, **options)
        self._others = others
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
        if self._others is not None:
            async with aclosing(super().attach(self._completed(requests, self._others))) as responses:
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

    async def _completed(
        self, requests: AsyncIterator[v1.AttachRequest], others: Callable[[], Sequence[Stats]]
    ) -> AsyncIterator[v1.AttachRequest]:
        async for request in requests:
            if request.HasField("report"):
                add_stats(request.report, others())
            yield request


def add_stats(report: types_pb2.LearnerReport, others: Iterable[Stats]) -> None:
    """Makes the report of one rank one of all."""
    for stats in others:
        report.sent_bytes += stats.bytes_up
        report.received_bytes += stats.bytes_down
        report.unsent_step_count = max(report.unsent_step_count, stats.unsent_step_count)
        report.dropped_step_count = max(report.dropped_step_count, stats.dropped_step_count)
        report.problem = report.problem or (stats.problem.reason if stats.problem else "")
        report.adopted.extend(
            types_pb2.FragmentVersion(fragment=name, version=version) for name, version in stats.versions.items()
        )
