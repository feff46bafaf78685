"""The simulation's transport as the quality world has it: parts of the usual size, and bulk that takes its time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable

from skerry.v1 import exchange_pb2
from tests.simulation.network import Network
from tests.simulation.records import LearnerRecord
from tests.simulation.sim_transport import SimTransport


class BulkTransport(SimTransport):
    """One learner's calls: a delta and an update each take `bulk_s` behind their header."""

    part_size_bytes = 2**20

    def __init__(
        self, network: Network, record: LearnerRecord, count: Callable[[], int], bulk_s: float, extra_delay: float
    ) -> None:
        """Sends each delta `extra_delay` time units late."""
        super().__init__(network, record, count)
        self._bulk_s = bulk_s
        self._extra_delay = extra_delay

    async def push_delta(
        self, requests: AsyncIterator[exchange_pb2.PushDeltaRequest]
    ) -> exchange_pb2.PushDeltaResponse:
        """Sends a push, whose data follow its header late."""

        async def slowly() -> AsyncIterator[exchange_pb2.PushDeltaRequest]:
            async for request in requests:
                yield request
                if request.WhichOneof("kind") == "header":
                    await asyncio.sleep(self._bulk_s)

        await asyncio.sleep(self._extra_delay)
        return await super().push_delta(slowly())

    async def pull_fragment(
        self, request: exchange_pb2.PullFragmentRequest
    ) -> AsyncGenerator[exchange_pb2.PullFragmentResponse, None]:
        """Opens a download, whose bulk follows its plan late."""
        count = 0
        async for response in super().pull_fragment(request):
            if count == 1:  # the plan is control, what follows is bulk
                await asyncio.sleep(self._bulk_s)
            count += 1
            yield response
