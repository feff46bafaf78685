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

    def take_heard(self) -> list[bytes]:
        """Returns what came over the attach stream since the last call, for the other ranks; for any thread."""
        return []

    def hear(self, heard: Iterable[bytes]) -> None:
        """Takes what the first rank has heard; on the event loop."""


class LeadingTransport(RankTransport):
    """The first rank's: its reports are of all ranks."""

    def __init__(self, *arguments: Any, others: Callable[[], Sequence[Stats]], **options: Any) -> None:
        """`others` returns the other ranks' statistics."""
        super().__init__(*arguments, **options)
        self._others = others
        self._heard: deque[bytes] = deque()

    def take_heard(self) -> list[bytes]:
        """As `RankTransport.take_heard`."""
        return [self._heard.popleft() for _ in range(len(self._heard))]

    async def attach(self, requests: AsyncIterator[v1.AttachRequest]) -> AsyncGenerator[v1.AttachResponse, None]:
        """As `Transport.attach`."""
        async with aclosing(super().attach(self._completed(requests))) as responses:
            async for response in responses:
                self._heard.append(response.SerializeToString())
                yield response

    async def _completed(self, requests: AsyncIterator[v1.AttachRequest]) -> AsyncIterator[v1.AttachRequest]:
        async for request in requests:
            if request.HasField("report"):
                add_stats(request.report, self._others())
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


class FollowingTransport(RankTransport):
    """Another rank's: its attach stream is what the first rank hands on."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._heard: asyncio.Queue[bytes | None] = asyncio.Queue()

    def hear(self, heard: Iterable[bytes]) -> None:
        """As `RankTransport.hear`."""
        for response in heard:
            self._heard.put_nowait(response)

    async def attach(self, requests: AsyncIterator[v1.AttachRequest]) -> AsyncGenerator[v1.AttachResponse, None]:
        """As `Transport.attach`: the reports go nowhere, since the first rank's are of all ranks."""

        async def until_leave() -> None:
            async for _ in requests:
                pass
            self._heard.put_nowait(None)

        reports = asyncio.ensure_future(until_leave())
        try:
            while (response := await self._heard.get()) is not None:
                yield v1.AttachResponse.FromString(response)
        finally:
            reports.cancel()
