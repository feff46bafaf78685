"""The interface between the client's logic and the network: messages of `skerry.v1` in and out, errors as SkerryError.

`GrpcTransport` calls a syncer over gRPC; a simulation calls servicers without sockets. Every method raises the right
class of SkerryError and nothing else (besides CancelledError). A status without a reason of Skerry may come from a
proxy, and a reason may be a later version's. Both say nothing about a push, so `push_delta` raises TryAgainError for
them, and `ask` an error of the class `unknown`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Final, Protocol, TypeAlias, TypeVar

from skerry.errors import RefusedError, SkerryError
from skerry.net.replicas import Connection
from skerry.v1 import exchange_pb2

A = TypeVar("A")
# Takes a unary method from a connection's stubs, as in `lambda stubs: stubs.runs.GetRun`.
Method: TypeAlias = Callable[[Connection], Callable[..., Awaitable[A]]]

# Bulk calls that one large transfer makes side by side. A TCP connection carries a window a round trip, by default
# some 3 MB, which is 0.2 Gbit/s where a round trip takes 100 ms.
LANE_COUNT: Final = 16


class Transport(Protocol):
    """The calls of an exchange. Streams live until they end or are closed."""

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

    def pull_fragment(
        self, request: exchange_pb2.PullFragmentRequest
    ) -> AsyncGenerator[exchange_pb2.PullFragmentResponse, None]:
        """Opens a download."""

    async def ask(
        self, method: Method[A], request: object, *, timeout_s: float, unknown: type[SkerryError] = RefusedError
    ) -> A:
        """Returns the answer to a unary call, on the connection of `attach`."""

    async def close(self) -> None:
        """Closes every connection; calls in flight fail."""
