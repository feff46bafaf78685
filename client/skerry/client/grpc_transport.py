"""The client's calls over gRPC: channels, deadlines, and the translation of statuses to SkerryError."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from typing import Any, Final, TypeVar

import grpc
from google.rpc import error_details_pb2, status_pb2

from skerry.client.errors import RefusedError, SkerryError, TryAgainError, error_of
from skerry.v1 import capabilities_pb2, capabilities_pb2_grpc, exchange_pb2, exchange_pb2_grpc, runs_pb2, runs_pb2_grpc

ERROR_DOMAIN: Final = "skerry"
_DETAILS_KEY: Final = "grpc-status-details-bin"
_OPTIONS: Final[list[tuple[str, int]]] = [
    # Each channel has a connection of its own, so that reports never queue behind bulk data.
    ("grpc.use_local_subchannel_pool", 1),
    # An unanswered ping reveals a half-open connection; a deadline would have to guess how long a transfer takes.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    # A syncer that restarts is back within seconds; gRPC's default back-off grows to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 2_000),
]
# Reasons for statuses that gRPC makes itself, without details from a syncer.
_REASONS: Final = {grpc.StatusCode.UNAVAILABLE: "UNREACHABLE", grpc.StatusCode.DEADLINE_EXCEEDED: "TIMEOUT"}
# After these statuses the same call may succeed later, whoever answered.
_PASSING: Final = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.INTERNAL,
    }
)

A = TypeVar("A")


class GrpcTransport:
    """A syncer at `target` (host:port), over two connections: one for attach and small calls, one for bulk.

    Must be made and used on one event loop. Without `credentials` the connection is plain text. `runs` and
    `capabilities` have the unary calls that no exchange makes; whoever calls them passes the call to `answer`.
    """

    def __init__(self, target: str, *, credentials: grpc.ChannelCredentials | None = None) -> None:
        self._control = _channel(target, credentials)
        self._bulk = _channel(target, credentials)
        self._exchange = exchange_pb2_grpc.ExchangeStub(self._control)
        self._bulk_exchange = exchange_pb2_grpc.ExchangeStub(self._bulk)
        self.runs = runs_pb2_grpc.RunsStub(self._control)
        self.capabilities = capabilities_pb2_grpc.CapabilitiesStub(self._control)

    def attach(
        self, requests: AsyncIterator[exchange_pb2.AttachRequest]
    ) -> AsyncGenerator[exchange_pb2.AttachResponse, None]:
        """Opens the attach stream."""
        return _stream(self._exchange.Attach(requests))

    async def push_delta(
        self, requests: AsyncIterator[exchange_pb2.PushDeltaRequest]
    ) -> exchange_pb2.PushDeltaResponse:
        """Sends a push on the bulk connection."""
        return await answer(self._bulk_exchange.PushDelta(requests), unknown=TryAgainError)

    async def query_push(
        self, request: exchange_pb2.QueryPushRequest, *, timeout_s: float
    ) -> exchange_pb2.QueryPushResponse:
        """Asks how far a push has come."""
        return await answer(self._exchange.QueryPush(request, timeout=timeout_s), unknown=TryAgainError)

    def pull_fragment(
        self, request: exchange_pb2.PullFragmentRequest
    ) -> AsyncGenerator[exchange_pb2.PullFragmentResponse, None]:
        """Opens a download on the bulk connection."""
        return _stream(self._bulk_exchange.PullFragment(request))

    def watch(self, request: exchange_pb2.WatchRequest) -> AsyncGenerator[exchange_pb2.WatchResponse, None]:
        """Follows a run."""
        return _stream(self._exchange.Watch(request))

    async def get_capabilities(
        self, request: capabilities_pb2.GetCapabilitiesRequest, *, timeout_s: float
    ) -> capabilities_pb2.GetCapabilitiesResponse:
        """Asks for the server's version, codecs and limits."""
        return await answer(self.capabilities.GetCapabilities(request, timeout=timeout_s))

    async def get_run(self, request: runs_pb2.GetRunRequest, *, timeout_s: float) -> runs_pb2.GetRunResponse:
        """Asks for a run."""
        return await answer(self.runs.GetRun(request, timeout=timeout_s))

    async def create_run(self, request: runs_pb2.CreateRunRequest, *, timeout_s: float) -> runs_pb2.CreateRunResponse:
        """Makes a draft."""
        return await answer(self.runs.CreateRun(request, timeout=timeout_s))

    async def commit_run(self, request: runs_pb2.CommitRunRequest, *, timeout_s: float) -> runs_pb2.CommitRunResponse:
        """Makes a draft the run of its name."""
        return await answer(self.runs.CommitRun(request, timeout=timeout_s))

    async def close(self) -> None:
        """Closes both connections."""
        await self._bulk.close(None)
        await self._control.close(None)


def _channel(target: str, credentials: grpc.ChannelCredentials | None) -> grpc.aio.Channel:
    if credentials is None:
        return grpc.aio.insecure_channel(target, options=_OPTIONS)
    return grpc.aio.secure_channel(target, credentials, options=_OPTIONS)


async def answer(call: Awaitable[A], *, unknown: type[SkerryError] = RefusedError) -> A:
    """Returns the answer to a unary call; raises SkerryError if it fails, as `error_from_rpc` says."""
    try:
        return await call
    except asyncio.CancelledError:
        _raise_if_call_was_cancelled()
        raise
    except grpc.aio.AioRpcError as error:
        raise error_from_rpc(error, unknown=unknown) from error
    except grpc.aio.UsageError as error:  # the channel was closed under the call
        raise error_of("UNREACHABLE", f"connection is closed. cause={error}") from error


async def _stream(call: Any) -> AsyncGenerator[Any, None]:
    """Yields a call's answers; the call is cancelled when the iterator is closed or dropped."""
    try:
        async for response in call:
            yield response
    except asyncio.CancelledError:
        _raise_if_call_was_cancelled()
        raise
    except grpc.aio.AioRpcError as error:
        raise error_from_rpc(error) from error
    except grpc.aio.UsageError as error:
        raise error_of("UNREACHABLE", f"connection is closed. cause={error}") from error
    finally:
        call.cancel()


def _raise_if_call_was_cancelled() -> None:
    """Raises if gRPC cancelled the call, because what it was to send failed, and the waiting task was not cancelled.

    Otherwise the task would end silently, as if it had been cancelled.
    """
    task = asyncio.current_task()
    if task is not None and not task.cancelling():
        raise error_of("CANCELLED", "the call was cancelled; what it was to send may have failed") from None


def error_from_rpc(error: grpc.aio.AioRpcError, *, unknown: type[SkerryError] = RefusedError) -> SkerryError:
    """Returns the error for a failed call: by the reason in its details, or else by the gRPC status.

    A status that tells nothing of the call, such as a proxy's UNIMPLEMENTED, gives an error of the class `unknown`, and
    so does a reason that only later versions know.
    """
    code = error.code()
    message = error.details() or code.name.lower()
    retry_after_s: float | None = None
    own: error_details_pb2.ErrorInfo | None = None
    trailing: Any = error.trailing_metadata()  # pairs; its published type is not iterable
    for key, value in trailing or ():
        if key != _DETAILS_KEY or not isinstance(value, bytes):
            continue
        for detail in status_pb2.Status.FromString(value).details:
            info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
            if detail.Unpack(info) and info.domain == ERROR_DOMAIN:
                own = info
            elif detail.Unpack(retry):
                retry_after_s = retry.retry_delay.ToTimedelta().total_seconds()
    if own is None:  # the names of gRPC's statuses are not looked up as reasons: OUT_OF_RANGE is both
        kind = TryAgainError if code in _PASSING else unknown
        return kind(_REASONS.get(code, code.name), message, retry_after_s=retry_after_s)
    reason = own.reason.removeprefix("ERROR_REASON_")
    return error_of(reason, message, retry_after_s=retry_after_s, metadata=dict(own.metadata), unknown=unknown)
