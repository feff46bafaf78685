"""What every call goes through: who calls, what it may do, and how much; errors become statuses.

All methods are served as if they took and gave streams of bytes, which is the same on the wire. Otherwise gRPC would
receive the one message of a unary call before the caller is known, and hold an incomplete one in memory without end.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import grpc
from google.protobuf.message import DecodeError
from google.rpc import code_pb2, status_pb2
from grpc_status import rpc_status

from skerry.runtime.logs import get_logger
from skerry_syncer.access.caller import CALLER, author
from skerry_syncer.access.certificates import client_uri, identity_of
from skerry_syncer.access.deny_list import DenyList
from skerry_syncer.access.limits import (
    FIRST_MESSAGE_S,
    FOLLOWING_CALLS,
    MAX_KNOWN,
    MAX_MESSAGE_BYTES,
    Allowance,
    patience_s,
    within,
)
from skerry_syncer.access.roles import check_message, check_role
from skerry_syncer.errors import SyncerError, bad_request
from skerry_syncer.rpc.status import as_syncer_error, status_of
from skerry_syncer.run.metrics import SyncerMetrics
from skerry_syncer.store.errors import StoreError

_LOG: Final = get_logger(__name__)
_OWN: Final = "/skerry.v1."
_HEALTH: Final = "/grpc.health.v1."
# Their messages have weights, which the budget of bytes in flight bounds.
# What a caller is told of runs is no failure of the store.
_EXPECTED: Final = frozenset({code_pb2.NOT_FOUND, code_pb2.ALREADY_EXISTS})
_BULK: Final = frozenset({"Exchange/PushDelta", "Exchange/PullFragment"})
_FOLLOWING: Final = frozenset({"Exchange/Attach", "Exchange/Watch"})

if TYPE_CHECKING:  # generic in their stub alone
    Handler = grpc.RpcMethodHandler[Any, Any]
    Context = grpc.aio.ServicerContext[Any, Any]


class Interceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in its stub alone
    """Serves the methods of all services."""

    def __init__(
        self,
        metrics: SyncerMetrics,
        *,
        has_roles: bool = False,
        has_open_health: bool = True,
        deny_list: DenyList | None = None,
    ) -> None:
        """Without roles every caller may call every method."""
        self._metrics = metrics
        self._has_roles = has_roles
        self._has_open_health = has_open_health
        self._deny_list = deny_list
        # Of each client, by its identity or, without one, by its connection.
        self._allowance_of = lru_cache(MAX_KNOWN)(lambda _client: Allowance())

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """Returns what serves the method."""
        handler, path = await continuation(handler_call_details), handler_call_details.method
        if handler is None:
            return handler  # type: ignore[unreachable]  # there is no such method

        async def serve(requests: AsyncIterator[bytes], context: Context) -> None:
            status = await self._serve(handler, path, requests, context)
            if status is not None:
                refusal = rpc_status.to_status(status)
                await context.abort(refusal.code, refusal.details, refusal.trailing_metadata)

        return grpc.stream_stream_rpc_method_handler(_forgotten(serve))

    async def _serve(
        self, handler: Handler, path: str, requests: AsyncIterator[bytes], context: Context
    ) -> status_pb2.Status | None:
        """Serves a call; returns the status of one that is refused."""
        method = path.removeprefix(_OWN).lstrip("/")
        serving: Any = handler.unary_unary or handler.stream_unary or handler.unary_stream or handler.stream_stream
        try:
            allowance = self._allowance_of(client_uri(context) or context.peer() or "")
            await allowance.take(FOLLOWING_CALLS if method in _FOLLOWING else 1)
            self._identify(path, context)
            async with aclosing(self._messages(handler, path, requests, allowance)) as messages:
                answers = serving(messages if handler.request_streaming else await _only(messages), context)
                if handler.response_streaming:
                    async with aclosing(answers):
                        async for answer in answers:
                            await self._send(answer, method, context, allowance)
                else:
                    await self._send(await answers, method, context, allowance)
        except (asyncio.CancelledError, grpc.aio.AbortError):
            raise
        except grpc.aio.InternalError as error:  # gRPC could not send
            _LOG.info("client has gone", method=method, peer=context.peer(), cause=str(error))
        except Exception as error:  # noqa: BLE001 - the outermost edge
            return self._refused(error, method, context)
        return None

    def _identify(self, path: str, context: Context) -> None:
        """Finds out who calls.

        Raises:
            SyncerError: UNAUTHENTICATED; PERMISSION_DENIED.
        """
        if not self._has_roles or (path.startswith(_HEALTH) and self._has_open_health):
            return
        caller = identity_of(context)
        CALLER.set(caller)
        self._check_denied()
        if path.startswith(_OWN):
            check_role(path.removeprefix(_OWN), caller)

    def _check_denied(self) -> None:
        """Raises SyncerError, PERMISSION_DENIED, if the caller is on the deny list now."""
        if self._deny_list is not None and (caller := CALLER.get()) is not None:
            self._deny_list.check(caller)

    async def _send(self, answer: Any, method: str, context: Context, allowance: Allowance) -> None:
        """Returns when the client has room for the answer.

        Raises:
            SyncerError: TOO_SLOW: it has none for too long. It receives the error when it reads on.
        """
        self._check_denied()
        data: bytes = answer.SerializeToString()
        self._metrics.sent_bytes.labels(method).inc(len(data))
        if method not in _BULK:
            allowance.spend(len(data))
        async with within(patience_s(len(data)), f"the client did not read what it asked for. size_bytes={len(data)}"):
            await context.write(data)

    async def _messages(
        self, handler: Handler, path: str, requests: AsyncIterator[bytes], allowance: Allowance
    ) -> AsyncGenerator[Any, None]:
        """Yields the messages of a call: whole, in time, parsed, and allowed to their sender."""
        parse, method, is_first = handler.request_deserializer, path.removeprefix(_OWN).lstrip("/"), True
        assert parse is not None, "generated handlers have one"
        while (data := await (_first_message(requests) if is_first else anext(requests, None))) is not None:
            self._metrics.received_bytes.labels(method).inc(len(data))
            if method not in _BULK:
                allowance.spend(len(data))
            if len(data) > MAX_MESSAGE_BYTES:
                message = f"message is too large. limit_bytes={MAX_MESSAGE_BYTES}, size_bytes={len(data)}"
                raise SyncerError("TOO_LARGE", message)
            try:
                request = parse(data)
            except DecodeError:
                raise bad_request("message can't be parsed; is it a protobuf message of the method's type?") from None
            self._check_denied()
            if is_first and path.startswith(_OWN) and (caller := CALLER.get()) is not None:
                check_message(method, caller, request)
            is_first = False
            yield request
            if method not in _BULK:
                await allowance.take()

    def _refused(self, error: Exception, method: str, context: Context) -> status_pb2.Status:
        """Returns the status for `error`, once it is counted and logged."""
        status, reason = status_of(error), as_syncer_error(error).reason
        self._metrics.refusals.labels(method, reason).inc()
        if status.code == code_pb2.INTERNAL:
            _LOG.error("call failed", method=method, reason=reason, exc_info=error)
        elif isinstance(error, StoreError) and status.code not in _EXPECTED:
            _LOG.warning("call failed", method=method, reason=reason, cause=str(error))
        elif reason != "QUOTA_EXCEEDED":  # of which there may be many
            caller = {"identity": author()} if author() else {}
            _LOG.info(
                "call refused", method=method, reason=reason, message=status.message, peer=context.peer(), **caller
            )
        return status


async def _only(messages: AsyncIterator[Any]) -> Any:
    """Returns the message of a method that takes one."""
    async for message in messages:
        return message
    raise bad_request("the call has no message")


async def _first_message(requests: AsyncIterator[bytes]) -> bytes | None:
    """Returns a call's first message, or None if it has none.

    Raises:
        SyncerError: TOO_SLOW.
    """
    message = f"the call's first message did not come within {FIRST_MESSAGE_S:.0f} s"
    async with within(FIRST_MESSAGE_S, message):
        return await anext(requests, None)


def _forgotten(serve: Callable[[Any, Any], Awaitable[None]]) -> Callable[[Any, Any], Awaitable[None]]:
    """Returns the handler such that nothing of a call stays in memory when it has ended.

    gRPC counts a call among the streams of its connection until Python has freed it. It is in a cycle with what reads
    its messages, and with the error by which it was aborted, whose traceback has frames that have the call. Python
    collects such cycles late: after 128 of them the connection was of no use.
    """

    async def served(requests: Any, context: Any) -> None:
        reading = aiter(requests)
        serving = serve(reading, context)
        del requests, context
        try:
            await serving
        except grpc.aio.AbortError as error:
            raise error.with_traceback(None) from None
        finally:
            await reading.aclose()
            del reading

    return served
