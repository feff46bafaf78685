"""Errors of the client, by what the caller does next.

    SkerryError                   every refusal and failure; its `reason` is stable
    ├── TryAgainError             the same call may succeed later, with the same bytes: repeat it after `retry_after_s`
    ├── WorkRefusedError          this delta is never accepted: its work goes into the next one, from a newer base
    ├── PoisonedError             the weights are not finite: drop the work and set the weights back
    ├── PlanExpiredError          the plan's objects were collected: ask for a new plan
    ├── CorruptDownloadError      bytes or weights do not have their digest: pull a snapshot
    ├── RunClosedError            the run takes no more deltas: train on alone, or stop
    ├── StopExchangingError       this learner must not exchange with this run any more; it may train on alone
    ├── StoreLostError            the run's log lost what it had: exchange nothing, say so, and ask again now and then
    ├── RunNotFoundError          no run of that name: create it, or check the name
    ├── RunExistsError            the name is taken: join that run; `metadata` has its `run_uid`
    └── RefusedError              the request is wrong: change it; a delta that it sent is never accepted

Reasons are those of `skerry.v1.ErrorReason` without their prefix. The client's own are UNREACHABLE, TLS_FAILED,
TIMEOUT, the names of gRPC's statuses, CORRUPT_DOWNLOAD, WEIGHTS_REPLACED, FROZEN_DIFFERS, RANKS_DIFFER, RANK_LEFT,
FORKED, INTERRUPTED for Ctrl-C in the middle of a change of the weights, STORE_REFUSED for a store that no syncer can
serve, BAD_ANSWER for an answer that this version can't read, and DEFECT for an error of Skerry itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeGuard

# Between two looks whether a log that lost entries has them again.
_LOST_STORE_WAIT_S: Final = 60.0


class SkerryError(Exception):
    """A failed call; `str()` says what happened, facts last."""

    def __init__(
        self,
        reason: str,
        message: str,
        *,
        retry_after_s: float | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.retry_after_s = retry_after_s
        self.metadata = dict(metadata or {})

    def __reduce__(self) -> tuple[type[SkerryError], tuple[str, str], dict[str, object]]:
        """Says how to copy and pickle it, as statistics are that have one."""
        return type(self), (self.reason, str(self)), vars(self)


class TryAgainError(SkerryError):
    """The same call may succeed later, after `retry_after_s` if the server stated it."""


class WorkRefusedError(SkerryError):
    """The delta will never be accepted; nothing of it was merged."""


class PoisonedError(SkerryError):
    """The delta has a value that is not finite, or is not plausible: the weights must be set back."""


class PlanExpiredError(SkerryError):
    """The plan's objects were collected."""


class CorruptDownloadError(SkerryError):
    """Bytes or weights do not have the digest that was announced."""


class RunClosedError(SkerryError):
    """The run takes no more deltas."""


class StopExchangingError(SkerryError):
    """This session, or this run, is over for this learner."""


class StoreLostError(SkerryError):
    """The run's log does not have what this learner has seen of it.

    To ask again is safe, because every call names the run's uid, the position seen and the digest of its base; but
    pauses are long, because a person has to bring the log back.
    """

    def __init__(self, reason: str, message: str, **details: Any) -> None:
        super().__init__(reason, message, **{**details, "retry_after_s": _LOST_STORE_WAIT_S})


class RunNotFoundError(SkerryError):
    """No run of that name."""


class RunExistsError(SkerryError):
    """The name is taken."""


class RefusedError(SkerryError):
    """The request is wrong, or not allowed."""


_REASONS: Final[Mapping[type[SkerryError], str]] = {
    TryAgainError: "STORE_UNAVAILABLE STORE_FULL DRAINING INTERNAL BAD_FRAME DIGEST_MISMATCH INCOMPLETE TOO_SLOW "
    "NEWER_FORMAT OBJECT_UNREADABLE RUN_OPENING UNAUTHENTICATED UNREACHABLE TLS_FAILED TIMEOUT CANCELLED UNKNOWN "
    "ABORTED RESOURCE_EXHAUSTED QUOTA_EXCEEDED SESSION_UNKNOWN",
    WorkRefusedError: "BASE_STALE BASE_FOREIGN BASE_FUTURE BASE_REPEATED ID_REUSED",
    PoisonedError: "NON_FINITE",
    PlanExpiredError: "PLAN_EXPIRED",
    CorruptDownloadError: "CORRUPT_DOWNLOAD",
    RunClosedError: "RUN_CLOSED",
    StopExchangingError: "RUN_REPLACED SESSION_FENCED EJECTED WEIGHTS_REPLACED RANKS_DIFFER RANK_LEFT FORKED "
    "INTERRUPTED DEFECT",
    StoreLostError: "STORE_ROLLED_BACK",
    RunNotFoundError: "RUN_NOT_FOUND",
    RunExistsError: "RUN_EXISTS",
    RefusedError: "BAD_REQUEST BAD_NAME RUN_DRAFT SHAPE_MISMATCH FRAGMENT_NOT_FOUND OUT_OF_RANGE TOO_LARGE "
    "ENCODING_UNSUPPORTED VERSION_NOT_FOUND LEARNER_NOT_FOUND PERMISSION_DENIED FROZEN_DIFFERS",
}
_CLASSES: Final = {reason: kind for kind, reasons in _REASONS.items() for reason in reasons.split()}


def is_transient(error: BaseException) -> TypeGuard[TryAgainError]:
    """Whether the same call may succeed later."""
    return isinstance(error, TryAgainError)


def error_of(
    reason: str,
    message: str,
    *,
    retry_after_s: float | None = None,
    metadata: Mapping[str, str] | None = None,
    unknown: type[SkerryError] = RefusedError,
) -> SkerryError:
    """Returns the error for a reason, in the class for it; an unknown reason gives an error of the class `unknown`."""
    kind = _CLASSES.get(reason, unknown)
    return kind(reason, message, retry_after_s=retry_after_s, metadata=metadata)
