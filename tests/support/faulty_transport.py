"""A transport to a real syncer that fails where a test says: faults as data, once each."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field

from skerry.errors import error_of
from skerry.net.grpc_transport import GrpcTransport
from skerry.v1 import exchange_pb2 as v1


@dataclass
class Faults:
    """What goes wrong next; every list is used up from its front."""

    lost_acknowledgements: int = 0  # pushes that are answered, but not to this client
    push_cuts: list[int] = field(default_factory=list)  # messages after which a push breaks off
    pull_cuts: list[int] = field(default_factory=list)  # messages after which a download breaks off
    corrupt_pulls: int = 0  # downloads whose first data have one bit turned
    attach_cuts: list[int] = field(default_factory=list)  # events after which the attach stream breaks


class FaultyTransport(GrpcTransport):
    """Fails by `faults`; whatever happened at the syncer before stands, as over a bad link."""

    def __init__(self, target: str, faults: Faults) -> None:
        super().__init__(target)
        self.faults = faults
        self.delta_ids: list[str] = []  # of every push that began, in order

    async def attach(self, requests: AsyncIterator[v1.AttachRequest]) -> AsyncGenerator[v1.AttachResponse, None]:
        """Breaks after some events."""
        left = self.faults.attach_cuts.pop(0) if self.faults.attach_cuts else None
        async for response in super().attach(requests):
            yield response
            if left is not None:
                left -= 1
                if left < 0:
                    raise error_of("UNREACHABLE", "attach stream was cut")

    async def push_delta(self, requests: AsyncIterator[v1.PushDeltaRequest]) -> v1.PushDeltaResponse:
        """Breaks off on the way, or loses the answer."""
        cut = self.faults.push_cuts.pop(0) if self.faults.push_cuts else None

        async def some() -> AsyncIterator[v1.PushDeltaRequest]:
            left = cut
            async for request in requests:
                if request.HasField("header"):
                    self.delta_ids.append(request.header.delta_id)
                if left == 0:
                    return
                left = None if left is None else left - 1
                yield request

        response = await super().push_delta(some())
        if cut is not None:
            raise error_of("UNREACHABLE", "push was cut")
        if self.faults.lost_acknowledgements:
            self.faults.lost_acknowledgements -= 1
            raise error_of("UNREACHABLE", "answer was lost")
        return response

    async def pull_fragment(self, request: v1.PullFragmentRequest) -> AsyncGenerator[v1.PullFragmentResponse, None]:
        """Breaks off on the way, or turns a bit."""
        cut = self.faults.pull_cuts.pop(0) if self.faults.pull_cuts else None
        async for response in super().pull_fragment(request):
            if cut == 0:
                raise error_of("UNREACHABLE", "download was cut")
            cut = None if cut is None else cut - 1
            if self.faults.corrupt_pulls and response.HasField("data"):
                self.faults.corrupt_pulls -= 1
                turned = bytearray(response.data.data)
                turned[-1] ^= 1
                response.data.data = bytes(turned)
            yield response
