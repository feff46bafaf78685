"""Admits the calls of every method, and translates their errors to `google.rpc.Status`.

Methods that take one message are served like those that take a stream, which is the same on the wire. Otherwise gRPC
would receive the message before the caller is authenticated, and hold an incomplete one in memory without a deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from functools import partial
from typing import Any, Final, NoReturn, Self

import grpc
from google.protobuf import any_pb2
from google.protobuf.duration_pb2 import Duration
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from skerry.runtime.clock import SystemClock
from skerry.runtime.logs import get_logger
from skerry.wire.bulk import DataRequest, serialized
from skerry.wire.layout import BadNameError
from skerry_syncer.access.caller import CALLER, Caller
from skerry_syncer.access.limits import (
    FOREIGN_BURST,
    FOREIGN_PAUSE_S,
    LEAST_MESSAGE_BYTES,
    MESSAGE_BYTES,
    MOST_FOREIGN_CALLS,
    SHORT_CALLS_A_SECOND,
    SHORT_CALLS_BURST_S,
    Arrivals,
    Calls,
    Check,
    Rate,
    Turns,
    admitted,
    anything,
    bounded,
    patience_s,
)
from skerry_syncer.errors import RETRY_ELSEWHERE_S, RETRY_FULL_S, RETRY_STORE_S, SyncerError, bad_request
from skerry_syncer.rpc.authentication import Authentication, named_by_certificate
from skerry_syncer.rpc.refusals import Refusals
from skerry_syncer.run.metrics import SyncerMetrics
from skerry_syncer.store.errors import (
    NewerFormatError,
    StoreError,
    StoreFullError,
    StoreUnavailableError,
    UnreadableObjectError,
)

_LOG: Final = get_logger(__name__)
DOMAIN: Final = "skerry"
# Lines in the log about calls of one method that failed.
_FAILURES: Final = Rate("failures", SystemClock(), burst=200, pause_s=1.0)
# A status and its details have to fit the 8 KiB of metadata that clients take.
_MOST_MESSAGE: Final = 1000
_OWN_METHODS: Final = "/skerry.v1."
_HEALTH: Final = "/grpc.health.v1."  # its servicer knows who may ask
# The largest message of methods that get neither weights nor the names of a run's tensors: to parse one takes long.
_SHORT_BYTES: Final = 2**20
# For how many calls a call counts: to look at a run from its start on, and further if it is refused.
_STARTS: Final = {"Exchange/Watch": 3, "Exchange/Attach": 3}
_REFUSED: Final = 2
_FOREIGN_BYTES: Final = 2**12  # of health and reflection
_LONG: Final = frozenset({"Exchange/PushDelta", "Exchange/Attach", "Runs/CreateRun"})

# The reasons of each code, as the comments of `skerry.v1.ErrorReason` have them.
_REASONS: Final[Mapping[int, str]] = {
    code_pb2.INVALID_ARGUMENT: "BAD_REQUEST BAD_NAME SHAPE_MISMATCH NON_FINITE BAD_FRAME DIGEST_MISMATCH OUT_OF_RANGE "
    "ENCODING_UNSUPPORTED",
    code_pb2.NOT_FOUND: "RUN_NOT_FOUND FRAGMENT_NOT_FOUND VERSION_NOT_FOUND",
    code_pb2.FAILED_PRECONDITION: "RUN_REPLACED RUN_CLOSED RUN_DRAFT SESSION_FENCED SESSION_UNKNOWN INCOMPLETE "
    "BASE_FUTURE BASE_STALE BASE_FOREIGN PLAN_EXPIRED",
    code_pb2.ALREADY_EXISTS: "RUN_EXISTS BASE_REPEATED ID_REUSED",
    code_pb2.UNAVAILABLE: "STORE_UNAVAILABLE DRAINING NEWER_FORMAT OBJECT_UNREADABLE RUN_OPENING",
    code_pb2.RESOURCE_EXHAUSTED: "STORE_FULL TOO_LARGE TOO_SLOW QUOTA_EXCEEDED",
    code_pb2.DATA_LOSS: "STORE_ROLLED_BACK",
    code_pb2.UNAUTHENTICATED: "UNAUTHENTICATED",
    code_pb2.PERMISSION_DENIED: "PERMISSION_DENIED",
}
_CODES: Final = {reason: code for code, reasons in _REASONS.items() for reason in reasons.split()}


def status_of(error: Exception) -> status_pb2.Status:
    """Returns the status for `error`. An error that is not this project's own becomes INTERNAL, without its message."""
    known = _as_syncer_error(error)
    info = error_details_pb2.ErrorInfo(reason=known.reason, domain=DOMAIN, metadata=known.metadata)
    details = [_packed(info)]
    if known.retry_after_s is not None:
        delay = Duration()
        delay.FromMilliseconds(round(known.retry_after_s * 1000))
        details.append(_packed(error_details_pb2.RetryInfo(retry_delay=delay)))
    return status_pb2.Status(
        code=_CODES.get(known.reason, code_pb2.INTERNAL), message=str(known)[:_MOST_MESSAGE], details=details
    )


def _as_syncer_error(error: Exception) -> SyncerError:
    match error:
        case SyncerError():
            return error
        case StoreUnavailableError():
            return SyncerError(error.reason, "the store can't be reached; retry", retry_after_s=RETRY_STORE_S)
        case StoreFullError():
            message = "the store is full; an operator must free space"
            return SyncerError(error.reason, message, retry_after_s=RETRY_FULL_S)
        case NewerFormatError():
            return SyncerError(error.reason, str(error), retry_after_s=RETRY_ELSEWHERE_S)
        case UnreadableObjectError():
            return SyncerError(error.reason, str(error), retry_after_s=RETRY_FULL_S, metadata={"object": error.name})
        case StoreError():
            return SyncerError(error.reason, str(error), metadata=getattr(error, "metadata", None))
        case BadNameError():
            return SyncerError("BAD_NAME", str(error))
        case _:
            return SyncerError("INTERNAL", "the server failed; its log has the error")


def _packed(message: Any) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed


class ErrorInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in its stub alone
    """Wraps the four kinds of methods; what they raise becomes the call's status.

    It refuses calls that `authentication` does not admit, before reading them, and messages above a limit without
    decoding them. gRPC's own limit must be higher, because a refusal by gRPC itself has no details. Services that are
    not of `skerry.v1` (health, reflection) admit by themselves.
    """

    def __init__(self, limit_bytes: int, metrics: SyncerMetrics, authentication: Authentication | None = None) -> None:
        """Takes the largest message that the contract allows, what counts bytes and refusals, and the check of callers.

        Without `authentication` every caller may call every method.
        """
        self._limit_bytes = limit_bytes
        self._metrics = metrics
        self._authentication = authentication
        self._arrivals = Arrivals()
        self._foreign_calls = Calls(MOST_FOREIGN_CALLS)
        self._foreign_messages = Rate("messages", SystemClock(), burst=FOREIGN_BURST, pause_s=FOREIGN_PAUSE_S)
        self._refusals = Refusals()
        self._turns = Turns(SHORT_CALLS_A_SECOND, burst_s=SHORT_CALLS_BURST_S)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """Returns the method's handler, wrapped."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None:
            return handler  # type: ignore[unreachable]  # there is no such method
        is_own = method.startswith(_OWN_METHODS)
        name = method.removeprefix(_OWN_METHODS).lstrip("/")
        limit_bytes = self._limit_bytes if name in _LONG else _SHORT_BYTES if is_own else _FOREIGN_BYTES
        parse = DataRequest.FromString if name == "Exchange/PushDelta" else handler.request_deserializer
        deserialize = self._bounded(parse, name, min(limit_bytes, self._limit_bytes))
        serialize = self._counted(name)

        async def refused(reason: str, message: str) -> None:
            self._metrics.refusals.labels(name, reason).inc()
            if message:
                self._refusals.log(method, reason, message)
            self._turns.charge(CALLER.get().sender, _REFUSED)
            await self._refusals.hold_back()

        def calling(context: grpc.aio.ServicerContext[Any, Any]) -> _Calling:
            CALLER.set(Caller(peer=context.peer() or ""))
            if not is_own:
                return self._foreign(method, context)
            if self._authentication is None:
                return nullcontext(anything)
            return self._authentication.admitted(name, context)

        async def given(requests: AsyncIterator[Any], check: Check) -> Any:
            turn = partial(self._turns.take, CALLER.get().sender)
            await turn(_STARTS.get(name, 0 if handler.unary_unary is None else 1))
            each = anything if is_own else partial(self._rated, method)
            messages = _Admitted(requests, check, self._arrivals, each, turn)
            return messages if handler.request_streaming else await messages.only()

        wrapping = (method, calling, given, refused)
        if (answer := handler.unary_unary or handler.stream_unary) is not None:
            serving = _forgotten(_answering(answer, *wrapping))
            return grpc.stream_unary_rpc_method_handler(serving, deserialize, serialize)
        serving = _forgotten(_streaming(handler.unary_stream or handler.stream_stream, *wrapping, serialize=serialize))
        return grpc.stream_stream_rpc_method_handler(serving, deserialize)

    def _rated(self, method: str, _: Any) -> None:
        """Counts a message to health or reflection, of which any number may come; raises QUOTA_EXCEEDED."""
        self._foreign_messages.take(f"{CALLER.get().address} {method}")

    @asynccontextmanager
    async def _foreign(self, method: str, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Check]:
        if self._authentication is not None and not method.startswith(_HEALTH):
            named_by_certificate(context)
        with self._foreign_calls.under_way(CALLER.get().address):
            yield anything

    def _bounded(self, deserializer: Callable[[bytes], Any] | None, method: str, limit_bytes: int) -> Any:
        assert deserializer is not None  # generated handlers have one
        received, parsed = self._metrics.received_bytes.labels(method), bounded(deserializer, limit_bytes)

        def counted(data: bytes) -> Any:
            received.inc(len(data))
            if method != "Exchange/PushDelta":  # mostly weights
                self._charge(len(data))
            return parsed(data)

        return counted

    def _counted(self, method: str) -> Callable[[Any], bytes]:
        sent = self._metrics.sent_bytes.labels(method)

        def counted(message: Any) -> bytes:
            data = serialized(message)
            sent.inc(len(data))
            if method != "Exchange/PullFragment" or message.HasField("plan"):
                self._charge(len(data))
            return data

        return counted

    def _charge(self, size_bytes: int) -> None:
        """Counts a long message as several calls of the client."""
        if size_bytes >= LEAST_MESSAGE_BYTES:
            self._turns.charge(CALLER.get().sender, -(-size_bytes // MESSAGE_BYTES))


# A call's context, within which its first message is checked by what it yields.
_Calling = AbstractAsyncContextManager[Check]
_Refused = Callable[[str, str], Awaitable[None]]


class _Admitted:
    """The messages of a call, each of them `admitted`; only the first names a run and a learner, and is checked.

    The first comes within `FIRST_MESSAGE_S`; what follows is awaited as the method sees fit.
    """

    def __init__(
        self,
        requests: AsyncIterator[Any],
        check: Check,
        arrivals: Arrivals,
        each: Check,
        turn: Callable[[], Awaitable[None]],
    ) -> None:
        """Checks the first message by `check` and all by `each`; each after the first comes in its `turn`."""
        self._requests = requests
        self._turn = turn
        self._each = each
        self._check: Check | None = check
        self._arrivals = arrivals

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        if (check := self._check) is None:
            await self._turn()
            return admitted(await anext(self._requests), self._each)
        self._check = None
        async with self._arrivals.awaiting(CALLER.get().sender):
            request = await anext(self._requests)
        return admitted(admitted(request, self._each), check)

    async def only(self) -> Any:
        """Returns the message of a method that takes one."""
        try:
            return await anext(self)
        except StopAsyncIteration:
            raise bad_request("the call has no message") from None


def _forgotten(serve: Callable[[Any, Any], Awaitable[Any]]) -> Callable[[Any, Any], Awaitable[Any]]:
    """Returns the handler such that nothing of a call stays in memory when it has ended.

    gRPC counts a call among the streams of its connection until Python has freed it. It is in a cycle with what reads
    its messages, and with the error by which it was aborted, whose traceback has frames that have the call. Python
    collects such cycles late or, if the call took long, hardly ever: after 128 of them the connection was of no use.
    """

    async def served(requests: Any, context: Any) -> Any:
        serving, reading = serve(requests, context), aiter(requests)
        del requests, context
        try:
            return await serving
        except grpc.aio.AbortError as error:
            raise error.with_traceback(None) from None
        finally:
            await reading.aclose()
            del reading

    return served


def _answering(
    behaviour: Any,
    method: str,
    calling: Callable[[Any], _Calling],
    given: Callable[[AsyncIterator[Any], Check], Awaitable[Any]],
    refused: _Refused,
) -> Callable[..., Awaitable[Any]]:
    async def answer(requests: AsyncIterator[Any], context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            async with calling(context) as check:
                return await behaviour(await given(requests, check), context)
        except (asyncio.CancelledError, grpc.aio.AbortError):
            raise
        except Exception as error:  # noqa: BLE001 - the outermost edge
            status = await _refusal(error, method, refused)
        return await _abort(status, context)

    return answer


def _streaming(
    behaviour: Any,
    method: str,
    calling: Callable[[Any], _Calling],
    given: Callable[[AsyncIterator[Any], Check], Awaitable[Any]],
    refused: _Refused,
    *,
    serialize: Callable[[Any], bytes],
) -> Callable[..., Awaitable[None]]:
    # Not a generator: one that gRPC sends from can't say how long a message may take.
    async def stream(requests: AsyncIterator[Any], context: grpc.aio.ServicerContext[Any, Any]) -> None:
        responses = None
        try:
            async with calling(context) as check:
                responses = behaviour(await given(requests, check), context)
                async for response in responses:
                    await _sent(serialize(response), context)
        except (asyncio.CancelledError, grpc.aio.AbortError):
            raise
        except Exception as error:  # noqa: BLE001 - the outermost edge
            failure = error
        else:
            return
        finally:
            aclose = getattr(responses, "aclose", None)
            if aclose is not None:
                await aclose()
        status = await _refusal(failure, method, refused)
        del failure  # its traceback has this call
        await _abort(status, context)

    return stream


async def _sent(response: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    """Returns when the client has room for the response.

    Raises:
        SyncerError: TOO_SLOW: it has none for too long. It receives the error when it reads on.
    """
    try:
        async with asyncio.timeout(patience_s(len(response))):
            await context.write(response)
    except TimeoutError:
        raise SyncerError(
            "TOO_SLOW",
            f"the client did not read what it asked for. size_bytes={len(response)}",
            retry_after_s=RETRY_STORE_S,
        ) from None


async def _refusal(error: Exception, method: str, refused: _Refused) -> status_pb2.Status:
    """Returns the status for `error`, once it is counted and logged and may be told."""
    status = status_of(error)
    reason = _as_syncer_error(error).reason
    is_refused = status.code not in {code_pb2.INTERNAL, code_pb2.DATA_LOSS} and not isinstance(error, StoreError)
    if not is_refused and not _FAILURES.is_due(method):
        pass
    elif status.code == code_pb2.INTERNAL:
        _LOG.error("call failed", method=method, reason=reason, exc_info=error)
    elif status.code == code_pb2.DATA_LOSS:
        _LOG.error("call failed", method=method, reason=reason, cause=str(error))
    elif isinstance(error, StoreError):
        _LOG.warning("call failed", method=method, reason=reason, cause=str(error))
    await refused(reason, str(error)[:_MOST_MESSAGE] if is_refused else "")
    return status


async def _abort(status: status_pb2.Status, context: grpc.aio.ServicerContext[Any, Any]) -> NoReturn:
    translated = rpc_status.to_status(status)
    await context.abort(translated.code, translated.details, translated.trailing_metadata)
    raise AssertionError("abort returned")
