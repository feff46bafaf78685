"""The interface between the client's logic and the network: messages of `skerry.v1` in and out, errors as SkerryError.

`GrpcTransport` calls a syncer over gRPC; a simulation calls servicers without sockets. Every method raises the right
class of SkerryError and nothing else (besides CancelledError). A status without a reason of Skerry may come from a
proxy, and a reason may be a later version's. Both say nothing about a push: `push_delta` and `query_push` raise
TryAgainError for them.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Final, Protocol

from skerry.v1 import capabilities_pb2, exchange_pb2, runs_pb2

# Bulk calls that one large transfer makes side by side. A TCP connection carries a window a round trip, by default
# some 3 MB, which is 0.2 Gbit/s where a round trip takes 100 ms.
LANE_COUNT: Final = 16


class Transport(Protocol):
    """The calls of an exchange. `timeout_s` bounds a unary call; streams live until they end or are closed."""

    def attach(
        self, requests: AsyncIterator[exchange_pb2.AttachRequest]
    ) -> AsyncGenerator[exchange_pb2.AttachResponse, None]:
        """Opens the attach stream, on a connection that carries no bulk data."""

    async def push_delta(
        self, requests: AsyncIterator[exchange_pb2.PushDeltaRequest]
    ) -> exchange_pb2.PushDeltaResponse:
        """Sends a push and returns its answer. It has no deadline: the caller watches its progress.

        Calls of this and of `pull_fragment` that overlap go over different connections, up to `LANE_COUNT`.
        """

    async def query_push(
        self, request: exchange_pb2.QueryPushRequest, *, timeout_s: float
    ) -> exchange_pb2.QueryPushResponse:
        """Asks how far a push has come."""

    def pull_fragment(
        self, request: exchange_pb2.PullFragmentRequest
    ) -> AsyncGenerator[exchange_pb2.PullFragmentResponse, None]:
        """Opens a download."""

    async def get_capabilities(
        self, request: capabilities_pb2.GetCapabilitiesRequest, *, timeout_s: float
    ) -> capabilities_pb2.GetCapabilitiesResponse:
        """Asks for the server's version, codecs and limits."""

    async def get_run(self, request: runs_pb2.GetRunRequest, *, timeout_s: float) -> runs_pb2.GetRunResponse:
        """Asks for a run."""

    async def create_run(self, request: runs_pb2.CreateRunRequest, *, timeout_s: float) -> runs_pb2.CreateRunResponse:
        """Makes a draft."""

    async def commit_run(self, request: runs_pb2.CommitRunRequest, *, timeout_s: float) -> runs_pb2.CommitRunResponse:
        """Makes a draft the run of its name."""

    async def close(self) -> None:
        """Closes every connection; calls in flight fail."""
