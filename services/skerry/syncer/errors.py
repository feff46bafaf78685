"""What a call is refused with, split by what the caller does next; translated to `google.rpc.Status` at the edge only.

    SyncerError          a reason of `skerry.v1.ErrorReason`, a message, when to retry, and facts for programs
    `-- DrainingError    this replica is going away: the same call works elsewhere                         DRAINING

The store's own errors (`skerry.store.errors`) carry reasons of the same list and reach the edge as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from skerry.store.log.state import Rejection
from skerry.wire.errors import WireError, WireReason

# What a caller of another replica waits before it tries again: about the time that a replica takes to come back.
RETRY_ELSEWHERE_S: Final = 0.5
# A store that could not be reached is tried again after this long.
RETRY_STORE_S: Final = 1.0
# Room in a store is made by a person.
RETRY_FULL_S: Final = 30.0


class SyncerError(Exception):
    """A call that was refused; nothing was done, or what was done is durable and may be repeated."""

    def __init__(
        self,
        reason: str,
        message: str,
        *,
        retry_after_s: float | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        """Takes a reason of `skerry.v1.ErrorReason` without its prefix."""
        super().__init__(message)
        self.reason = reason
        self.retry_after_s = retry_after_s
        self.metadata = dict(metadata or {})


class DrainingError(SyncerError):
    """This replica takes no new work."""

    def __init__(self) -> None:
        """States when to try elsewhere."""
        super().__init__("DRAINING", "this replica is draining; retry elsewhere", retry_after_s=RETRY_ELSEWHERE_S)


def from_rejection(rejection: Rejection, **metadata: str) -> SyncerError:
    """Returns the error of an item that the fold does not admit."""
    return SyncerError(rejection.reason, rejection.detail, metadata=metadata)


def bad_request(message: str) -> SyncerError:
    """Returns the error of a malformed field, which the message names."""
    return SyncerError("BAD_REQUEST", message)


_REASON_OF_WIRE: Final = {WireReason.NON_FINITE: "NON_FINITE", WireReason.LAYOUT: "OUT_OF_RANGE"}


def from_wire(error: WireError) -> SyncerError:
    """Returns the error of frames that can't be taken; every fault that is not of the values is `BAD_FRAME`."""
    reason = _REASON_OF_WIRE.get(error.reason, "BAD_FRAME")
    return SyncerError(reason, str(error), metadata={"wire_reason": error.reason.value})
