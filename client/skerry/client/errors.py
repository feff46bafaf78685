"""Errors of the client, split by what the caller does next.

    SkerryError                   every refusal and failure; `reason` is stable and append-only
    ├── TryAgainError             the same call with the same bytes may succeed later: wait `retry_after_s`, call again
    ├── AttachAgainError          the session is not known there: attach, then call again
    ├── WorkRefusedError          this delta will never be accepted: its work goes into the next one, from a newer base
    ├── PoisonedError             the weights hold what is not finite: drop the work and replace the fragment
    ├── PlanExpiredError          the plan's objects were collected: ask for a new plan
    ├── CorruptDownloadError      what arrived is not what its digest says: pull a snapshot
    ├── RunClosedError            the run takes no more deltas: train on alone, or stop
    ├── StopExchangingError       this learner must not exchange with this run any more: say so, and train on
    ├── RunNotFoundError          no run of that name: create it, or check the name
    ├── RunExistsError            the name is taken: join that run; `uid` is its
    └── RefusedError              the call is wrong as it is: change it

Reasons are those of `skerry.v1.ErrorReason` without their prefix, and for what never reached a server: UNREACHABLE,
TIMEOUT, and gRPC's own status names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final


class SkerryError(Exception):
    """A call that failed; `str()` says what happened, facts last."""

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


class TryAgainError(SkerryError):
    """The same call may succeed later; where the server said when, `retry_after_s` has it."""


class AttachAgainError(SkerryError):
    """The session is not known there: attach first."""


class WorkRefusedError(SkerryError):
    """The delta will never be accepted; nothing of it was merged."""


class PoisonedError(SkerryError):
    """The delta holds what is not finite: the fragment must be replaced."""


class PlanExpiredError(SkerryError):
    """The plan's objects were collected."""


class CorruptDownloadError(SkerryError):
    """Bytes or weights that do not have the digest that they should."""


class RunClosedError(SkerryError):
    """The run takes no more deltas."""


class StopExchangingError(SkerryError):
    """This session, or this run, is over for this learner."""


class RunNotFoundError(SkerryError):
    """No run of that name."""


class RunExistsError(SkerryError):
    """The name is taken."""

    @property
    def uid(self) -> str:
        """The uid of the run that has the name; empty where the server did not say."""
        return self.metadata.get("run_uid", "")


class RefusedError(SkerryError):
    """The call is wrong as it is."""


_CLASSES: Final[Mapping[str, type[SkerryError]]] = {
    "STORE_UNAVAILABLE": TryAgainError,
    "STORE_FULL": TryAgainError,
    "DRAINING": TryAgainError,
    "INTERNAL": TryAgainError,
    "BAD_FRAME": TryAgainError,
    "DIGEST_MISMATCH": TryAgainError,
    "INCOMPLETE": TryAgainError,
    "TOO_SLOW": TryAgainError,
    "UNREACHABLE": TryAgainError,
    "TIMEOUT": TryAgainError,
    "CANCELLED": TryAgainError,
    "UNKNOWN": TryAgainError,
    "ABORTED": TryAgainError,
    "RESOURCE_EXHAUSTED": TryAgainError,
    "SESSION_UNKNOWN": AttachAgainError,
    "BASE_STALE": WorkRefusedError,
    "BASE_FOREIGN": WorkRefusedError,
    "BASE_FUTURE": WorkRefusedError,
    "BASE_REPEATED": WorkRefusedError,
    "ID_REUSED": WorkRefusedError,
    "NON_FINITE": PoisonedError,
    "PLAN_EXPIRED": PlanExpiredError,
    "CORRUPT_DOWNLOAD": CorruptDownloadError,
    "RUN_CLOSED": RunClosedError,
    "RUN_REPLACED": StopExchangingError,
    "STORE_ROLLED_BACK": StopExchangingError,
    "SESSION_FENCED": StopExchangingError,
    "RUN_NOT_FOUND": RunNotFoundError,
    "RUN_EXISTS": RunExistsError,
}


def error_of(
    reason: str,
    message: str,
    *,
    retry_after_s: float | None = None,
    metadata: Mapping[str, str] | None = None,
) -> SkerryError:
    """Returns the error for a reason, in the class that says what to do; a reason not known here is a RefusedError."""
    kind = _CLASSES.get(reason, RefusedError)
    return kind(reason, message, retry_after_s=retry_after_s, metadata=metadata)
