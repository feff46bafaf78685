"""Translates the errors of every method of `skerry.v1` to `google.rpc.Status`.

The stock services (health, reflection) are not wrapped: wrapping breaks the `Watch` method of health.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NoReturn, Self

import grpc
import structlog
from google.protobuf import any_pb2
from google.protobuf.duration_pb2 import Duration
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from skerry.store.errors import (
    NewerFormatError,
    StoreError,
    StoreFullError,
    StoreUnavailableError,
    UnreadableObjectError,
)
from skerry.syncer.errors import RETRY_ELSEWHERE_S, RETRY_FULL_S, RETRY_STORE_S, SyncerError
from skerry.syncer.metrics import SyncerMetrics
from skerry.wire.layout import BadNameError

_LOG: Final = structlog.get_logger(__name__)
DOMAIN: Final = "skerry"
_OWN_METHODS: Final = "/skerry.v1."

# The reasons of each code, as the comments of `skerry.v1.ErrorReason` have them.
_REASONS: Final[Mapping[int, str]] = {
    code_pb2.INVALID_ARGUMENT: "BAD_REQUEST BAD_NAME SHAPE_MISMATCH NON_FINITE BAD_FRAME DIGEST_MISMATCH OUT_OF_RANGE "
    "ENCODING_UNSUPPORTED",
    code_pb2.NOT_FOUND: "RUN_NOT_FOUND FRAGMENT_NOT_FOUND VERSION_NOT_FOUND",
    code_pb2.FAILED_PRECONDITION: "RUN_REPLACED RUN_CLOSED RUN_DRAFT SESSION_FENCED SESSION_UNKNOWN INCOMPLETE "
    "BASE_FUTURE BASE_STALE BASE_FOREIGN PLAN_EXPIRED",
    code_pb2.ALREADY_EXISTS: "RUN_EXISTS BASE_REPEATED ID_REUSED",
    code_pb2.UNAVAILABLE: "STORE_UNAVAILABLE DRAINING NEWER_FORMAT OBJECT_UNREADABLE RUN_OPENING",
    code_pb2.RESOURCE_EXHAUSTED: "STORE_FULL TOO_LARGE TOO_SLOW",
    code_pb2.DATA_LOSS: "STORE_ROLLED_BACK",
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
    return status_pb2.Status(code=_CODES.get(known.reason, code_pb2.INTERNAL), message=str(known), details=details)


def _as_syncer_error(error: Exception) -> SyncerError:
    match error:
        case SyncerError():
            return error
        case StoreUnavailableError():
            return SyncerError(error.reason, "the store can't be reached; retry", retry_after_s=RETRY_STORE_S)
        case StoreFullError():
            return SyncerError(
                error.reason, "the store is full; an operator must free space", retry_after_s=RETRY_FULL_S
            )
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

    It also refuses messages above a limit, undecoded. gRPC's own limit must be higher: what gRPC refuses by itself has
    no details.
    """

    def __init__(self, limit_bytes: int, metrics: SyncerMetrics) -> None:
        """Takes the largest message that the contract allows, and what counts bytes and refusals."""
        self._limit_bytes = limit_bytes
        self._metrics = metrics

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """Returns the method's handler, wrapped if it is one of `skerry.v1`."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or not method.startswith(_OWN_METHODS):
            return handler
        name = method.removeprefix(_OWN_METHODS)
        serializers = {
            "request_deserializer": self._bounded(handler.request_deserializer, name),
            "response_serializer": self._counted(handler.response_serializer, name),
        }

        def refused(reason: str) -> None:
            self._metrics.refusals.labels(name, reason).inc()

        wrapping = (method, _Admitted if handler.request_streaming else _admitted, refused)
        if handler.unary_unary is not None:
            return grpc.unary_unary_rpc_method_handler(_answering(handler.unary_unary, *wrapping), **serializers)
        if handler.unary_stream is not None:
            return grpc.unary_stream_rpc_method_handler(_streaming(handler.unary_stream, *wrapping), **serializers)
        if handler.stream_unary is not None:
            return grpc.stream_unary_rpc_method_handler(_answering(handler.stream_unary, *wrapping), **serializers)
        return grpc.stream_stream_rpc_method_handler(_streaming(handler.stream_stream, *wrapping), **serializers)

    def _bounded(self, deserializer: Callable[[bytes], Any] | None, method: str) -> Callable[[bytes], Any]:
        assert deserializer is not None  # generated handlers have one
        limit, received = self._limit_bytes, self._metrics.received_bytes.labels(method)

        def bounded(data: bytes) -> Any:
            received.inc(len(data))
            return deserializer(data) if len(data) <= limit else _Oversized(len(data), limit)

        return bounded

    def _counted(self, serializer: Callable[[Any], bytes] | None, method: str) -> Callable[[Any], bytes]:
        assert serializer is not None  # generated handlers have one
        sent = self._metrics.sent_bytes.labels(method)

        def counted(message: Any) -> bytes:
            data = serializer(message)
            sent.inc(len(data))
            return data

        return counted


@dataclass(frozen=True)
class _Oversized:
    """Stands for a message above the limit, until it can be refused."""

    size_bytes: int
    limit_bytes: int


def _admitted(request: Any) -> Any:
    """Returns the request.

    Raises:
        SyncerError: TOO_LARGE: it was above the limit.
    """
    if isinstance(request, _Oversized):
        raise SyncerError(
            "TOO_LARGE", f"message is too large. limit_bytes={request.limit_bytes}, size_bytes={request.size_bytes}"
        )
    return request


class _Admitted:
    """The messages of a stream, each of them `_admitted`."""

    def __init__(self, requests: AsyncIterator[Any]) -> None:
        self._requests = requests

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        return _admitted(await anext(self._requests))


def _answering(
    behaviour: Any, method: str, admit: Callable[[Any], Any], refused: Callable[[str], None]
) -> Callable[..., Awaitable[Any]]:
    async def answer(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            return await behaviour(admit(request), context)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001 - the outermost edge
            await _abort(error, method, context, refused)

    return answer


def _streaming(
    behaviour: Any, method: str, admit: Callable[[Any], Any], refused: Callable[[str], None]
) -> Callable[..., AsyncIterator[Any]]:
    async def stream(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        responses = None
        try:
            responses = behaviour(admit(request), context)
            async for response in responses:
                yield response
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001 - the outermost edge
            await _abort(error, method, context, refused)
        finally:
            aclose = getattr(responses, "aclose", None)
            if aclose is not None:
                await aclose()

    return stream


async def _abort(
    error: Exception, method: str, context: grpc.aio.ServicerContext[Any, Any], refused: Callable[[str], None]
) -> NoReturn:
    status = status_of(error)
    reason = _as_syncer_error(error).reason
    refused(reason)
    if status.code in {code_pb2.INTERNAL, code_pb2.DATA_LOSS}:
        _LOG.error("call failed", method=method, reason=reason, exc_info=error)
    elif isinstance(error, StoreError):
        _LOG.warning("call failed", method=method, reason=reason, cause=str(error))
    else:
        _LOG.info("call refused", method=method, reason=reason, message=str(error))
    translated = rpc_status.to_status(status)
    await context.abort(translated.code, translated.details, translated.trailing_metadata)
    raise AssertionError("abort returned")
