"""Translates errors to `google.rpc.Status`, with ErrorInfo and, where the same call may succeed later, RetryInfo."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from google.rpc import code_pb2, error_details_pb2, status_pb2

from skerry.wire.errors import FrameError, WireReason
from skerry.wire.layout import BadNameError
from skerry_syncer.errors import RETRY_ELSEWHERE_S, RETRY_FULL_S, RETRY_STORE_S, SyncerError
from skerry_syncer.store.errors import StoreError

DOMAIN: Final = "skerry"
# A status and its details have to fit the 8 KiB of metadata that clients take.
_MAX_MESSAGE: Final = 1000
# The reasons of each code, as the comments of `skerry.v1.ErrorReason` have them.
_REASONS: Final[Mapping[int, str]] = {
    code_pb2.INVALID_ARGUMENT: "BAD_REQUEST BAD_NAME SHAPE_MISMATCH NON_FINITE BAD_FRAME DIGEST_MISMATCH OUT_OF_RANGE "
    "ENCODING_UNSUPPORTED",
    code_pb2.NOT_FOUND: "RUN_NOT_FOUND FRAGMENT_NOT_FOUND VERSION_NOT_FOUND LEARNER_NOT_FOUND",
    code_pb2.FAILED_PRECONDITION: "RUN_REPLACED RUN_CLOSED RUN_DRAFT SESSION_FENCED SESSION_UNKNOWN INCOMPLETE "
    "BASE_FUTURE BASE_STALE BASE_FOREIGN PLAN_EXPIRED",
    code_pb2.ALREADY_EXISTS: "RUN_EXISTS BASE_REPEATED ID_REUSED",
    code_pb2.UNAVAILABLE: "STORE_UNAVAILABLE DRAINING NEWER_FORMAT OBJECT_UNREADABLE RUN_OPENING",
    code_pb2.RESOURCE_EXHAUSTED: "STORE_FULL TOO_LARGE TOO_SLOW QUOTA_EXCEEDED",
    code_pb2.DATA_LOSS: "STORE_ROLLED_BACK",
    code_pb2.UNAUTHENTICATED: "UNAUTHENTICATED",
    code_pb2.PERMISSION_DENIED: "PERMISSION_DENIED EJECTED",
}
# In place of the store's own messages, which are for its operator.
_STORE_MESSAGES: Final = {
    "STORE_UNAVAILABLE": "the store can't be reached; retry",
    "STORE_FULL": "the store is full; an operator must free space",
}
_RETRY_S: Final = {
    "STORE_UNAVAILABLE": RETRY_STORE_S,
    "STORE_FULL": RETRY_FULL_S,
    "NEWER_FORMAT": RETRY_ELSEWHERE_S,
    "OBJECT_UNREADABLE": RETRY_FULL_S,
}
_FRAME_REASONS: Final = {WireReason.NON_FINITE: "NON_FINITE", WireReason.LAYOUT: "OUT_OF_RANGE"}
_CODES: Final = {reason: code for code, reasons in _REASONS.items() for reason in reasons.split()}


def status_of(error: Exception) -> status_pb2.Status:
    """Returns the status for `error`."""
    known = as_syncer_error(error)
    status = status_pb2.Status(code=_CODES.get(known.reason, code_pb2.INTERNAL), message=str(known)[:_MAX_MESSAGE])
    info = error_details_pb2.ErrorInfo(reason=known.reason, domain=DOMAIN, metadata=known.metadata)
    status.details.add().Pack(info)
    if known.retry_after_s is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(round(known.retry_after_s * 1000))
        status.details.add().Pack(retry)
    return status


def as_syncer_error(error: Exception) -> SyncerError:
    """Returns what a client is told; an error that is not this project's own becomes INTERNAL, without its message."""
    match error:
        case SyncerError():
            return error
        case StoreError():
            message, retry_s = _STORE_MESSAGES.get(error.reason, str(error)), _RETRY_S.get(error.reason)
            metadata = getattr(error, "metadata", None)
            return SyncerError(error.reason, message, retry_after_s=retry_s, metadata=metadata)
        case FrameError():
            reason = _FRAME_REASONS.get(error.reason, "BAD_FRAME")
            return SyncerError(reason, str(error), metadata={"wire_reason": error.reason.value})
        case BadNameError():
            return SyncerError("BAD_NAME", str(error))
        case _:
            return SyncerError("INTERNAL", "the server failed; its log has the error")
