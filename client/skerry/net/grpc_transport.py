"""The client's calls over gRPC: deadlines, and the translation of statuses to SkerryError."""

from __future__ import annotations

import asyncio
import ctypes
import os
import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing, contextmanager, suppress
from functools import cache
from typing import Any, Final
from weakref import WeakSet

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from skerry.errors import RefusedError, SkerryError, TryAgainError, error_of
from skerry.net.forks import OwnProcess
from skerry.net.handshakes import explain
from skerry.net.replicas import CONTROL, Connection, Replica, Replicas
from skerry.net.tls import Insecure, Tls
from skerry.net.transport import LANE_COUNT, A, Method
from skerry.runtime.addresses import split_targets
from skerry.v1 import exchange_pb2

ERROR_DOMAIN: Final = "skerry"
_DETAILS_KEY: Final = "grpc-status-details-bin"
# Reasons for statuses that gRPC makes itself, without details from a syncer.
_REASONS: Final = {grpc.StatusCode.UNAVAILABLE: "UNREACHABLE", grpc.StatusCode.DEADLINE_EXCEEDED: "TIMEOUT"}
# After these statuses the same call may succeed later, whether the syncer or a proxy answered.
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

_TRANSPORTS: Final[WeakSet[GrpcTransport]] = WeakSet()


class GrpcTransport:
    """One or more syncer replicas, with a connection to each for attach and small calls, and others for bulk.

    Bulk calls that overlap take up to `LANE_COUNT` connections, of which `lane_count` are made at once, since that
    takes several round trips, and others when they are needed.
    `target` is host:port, or several separated by commas; a host may have several addresses. Each call goes to the next
    healthy replica, and fails with UNREACHABLE when that hangs and another does not. Must be made and used on one event
    loop. Without `tls` connections on loopback are plaintext, and others use TLS and trust the public authorities;
    "insecure" has all be plaintext.

    Raises:
        StopExchangingError: FORKED: this process was forked from one that has connected.
        ValueError: a target is empty, or the files of `tls` can't be used.
    """

    def __init__(
        self,
        target: str,
        *,
        tls: Tls | Insecure | None = None,
        jitter: random.Random | None = None,
        lane_count: int = 0,
    ) -> None:
        """With `jitter` the replicas are called in an order of this client's own, so that many clients spread."""
        _first_process().check()
        _TRANSPORTS.add(self)
        targets = split_targets(target)
        if jitter is not None:
            targets = tuple(jitter.sample(targets, len(targets)))
        self._replicas = Replicas(targets, tls)
        self._replicas.begin(lane_count)
        self._lane_calls = [0] * LANE_COUNT  # under way, by lane

    @property
    def has_others(self) -> bool:
        """Whether a call may be repeated at another replica."""
        return self._replicas.has_others

    def attach(
        self, requests: AsyncIterator[exchange_pb2.AttachRequest]
    ) -> AsyncGenerator[exchange_pb2.AttachResponse, None]:
        """Opens the attach stream. An error of `requests` is raised as it is."""
        sending = _Sending(requests)
        return self._stream(CONTROL, lambda connection: connection.exchange.Attach(sending.requests()), sending)

    async def push_delta(
        self, requests: AsyncIterator[exchange_pb2.PushDeltaRequest]
    ) -> exchange_pb2.PushDeltaResponse:
        """Sends a push on a bulk connection. An error of `requests` is raised as it is."""
        sending = _Sending(requests)
        with self._lane() as lane:
            return await self.ask(
                lambda connection: connection.exchange.PushDelta,
                sending.requests(),
                unknown=TryAgainError,
                number=lane,
                sending=sending,
            )

    async def pull_fragment(
        self, request: exchange_pb2.PullFragmentRequest
    ) -> AsyncGenerator[exchange_pb2.PullFragmentResponse, None]:
        """Opens a download on a bulk connection."""
        with self._lane() as lane:
            opened = self._stream(lane, lambda connection: connection.exchange.PullFragment(request))
            async with aclosing(opened) as responses:
                async for response in responses:
                    yield response

    def watch(self, request: exchange_pb2.WatchRequest) -> AsyncGenerator[exchange_pb2.WatchResponse, None]:
        """Follows a run."""
        return self._stream(CONTROL, lambda connection: connection.exchange.Watch(request))

    async def ask(
        self,
        method: Method[A],
        request: object,
        *,
        timeout_s: float | None = None,
        unknown: type[SkerryError] = RefusedError,
        number: int = CONTROL,
        sending: _Sending | None = None,
    ) -> A:
        """Returns the next replica's one answer to a call; raises SkerryError if it fails, as `error_from_rpc` says."""
        connection = await self._replicas.next(number)
        call = method(connection)(request, timeout=timeout_s)
        with self._called(connection.replica, call, unknown=unknown, sending=sending):
            answer = await call
            connection.replica.life.heard()
            return answer

    async def close(self) -> None:
        """Closes every connection."""
        await self._replicas.close()

    @contextmanager
    def _lane(self) -> Iterator[int]:
        """Yields the bulk connection with the fewest calls; of equal ones the first, so that it stays warm."""
        lane = min(range(LANE_COUNT), key=self._lane_calls.__getitem__)
        self._lane_calls[lane] += 1
        try:
            yield lane
        finally:
            self._lane_calls[lane] -= 1

    async def _stream(
        self, number: int, open_call: Callable[[Connection], Any], sending: _Sending | None = None
    ) -> AsyncGenerator[Any, None]:
        """Yields the next replica's answers to a call, which is cancelled when the iterator is closed or dropped."""
        connection = await self._replicas.next(number)
        call = open_call(connection)
        with self._called(connection.replica, call, sending=sending):
            async for response in call:
                connection.replica.life.heard()
                yield response

    @contextmanager
    def _called(
        self,
        replica: Replica,
        call: Any,
        *,
        unknown: type[SkerryError] = RefusedError,
        sending: _Sending | None = None,
    ) -> Iterator[None]:
        """Says what an error of the call means; at the end of the context the call is over."""
        replica.calls.add(call)
        try:
            yield
        except asyncio.CancelledError:
            if call not in replica.calls and replica.hang is not None:
                raise replica.hang from None
            _raise_if_call_was_cancelled(sending)
            raise
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error, unknown=unknown, replicas=self._replicas) from error
        except grpc.aio.UsageError as error:  # the channel was closed under the call
            raise error_of("UNREACHABLE", f"connection is closed. cause={error}") from error
        finally:
            replica.calls.discard(call)
            if not _first_process().is_forked:  # where this is garbage, and gRPC has no threads
                call.cancel()


@cache
def _first_process() -> OwnProcess:
    """Returns the first process to use gRPC; its forked children can't, since they have none of gRPC's threads."""
    os.register_at_fork(after_in_child=_keep_transports)
    return OwnProcess()


def _keep_transports() -> None:
    """Keeps a forked child from ever destroying channels, which waits for threads that it does not have, or aborts."""
    for transport in list(_TRANSPORTS):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(transport))


class _Sending:
    """What a call sends, and the error by which that failed: gRPC cancels the call, and drops the error."""

    def __init__(self, requests: AsyncIterator[Any]) -> None:
        self.error: Exception | None = None
        self._requests = requests

    async def requests(self) -> AsyncIterator[Any]:
        """Yields them."""
        try:
            async for request in self._requests:
                yield request
        except Exception as error:
            self.error = error
            raise


def _raise_if_call_was_cancelled(sending: _Sending | None) -> None:
    """Raises if gRPC cancelled the call, because what it was to send failed, and the waiting task was not cancelled.

    Otherwise the task would end silently, as if it had been cancelled.
    """
    task = asyncio.current_task()
    if task is not None and not task.cancelling():
        if sending is not None and sending.error is not None:
            raise sending.error
        raise error_of("CANCELLED", "the call was cancelled") from None


def error_from_rpc(
    error: grpc.aio.AioRpcError, *, unknown: type[SkerryError] = RefusedError, replicas: Replicas | None = None
) -> SkerryError:
    """Returns the error for a failed call: by the reason in its details, or else by the gRPC status.

    Where a connection could not be made, how `replicas` are called decides what that means. A status that tells nothing
    of the call, such as a proxy's UNIMPLEMENTED, gives an error of the class `unknown`, and so does a reason that only
    later versions know.
    """
    code = error.code()
    message = error.details() or code.name.lower()
    retry_after_s: float | None = None
    own: error_details_pb2.ErrorInfo | None = None
    trailing: Any = error.trailing_metadata()  # pairs; its published type is not iterable
    for key, value in trailing or ():
        if key != _DETAILS_KEY or not isinstance(value, bytes):
            continue
        with suppress(DecodeError):  # details that can't be read say nothing
            for detail in status_pb2.Status.FromString(value).details:
                info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
                if detail.Unpack(info) and info.domain == ERROR_DOMAIN:
                    own = info
                elif detail.Unpack(retry):
                    retry_after_s = retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9
    if own is None:  # the names of gRPC's statuses are not looked up as reasons: OUT_OF_RANGE is both
        has_tls, proxy = (replicas.has_tls, replicas.proxy) if replicas else (False, "")
        if code is grpc.StatusCode.UNAVAILABLE and (explained := explain(message, has_tls=has_tls, proxy=proxy)):
            return error_of(*explained, retry_after_s=retry_after_s)
        kind = TryAgainError if code in _PASSING else unknown
        return kind(_REASONS.get(code, code.name), message, retry_after_s=retry_after_s)
    reason = own.reason.removeprefix("ERROR_REASON_")
    return error_of(reason, message, retry_after_s=retry_after_s, metadata=dict(own.metadata), unknown=unknown)
