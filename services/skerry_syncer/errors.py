"""Errors that refuse a call; the interceptor translates them to `google.rpc.Status`.

    SyncerError          a reason of `skerry.v1.ErrorReason`, a message, when to retry, and metadata
    `-- DrainingError    this replica is shutting down: the same call works on another one      DRAINING

The store's errors (`skerry_syncer.store.errors`) use the same list of reasons and reach the interceptor unchanged, as
do those of frames that can't be decoded (`skerry.wire.errors`).
"""

from __future__ import annotations

from typing import Final

from skerry.errors import SkerryError
from skerry_syncer.store.log.state import Rejection

# Pause before repeating a call that a draining replica refused: about the time that a restart takes.
RETRY_ELSEWHERE_S: Final = 0.5
# Pause before repeating a call that failed because the store could not be reached.
RETRY_STORE_S: Final = 1.0
# Pause before repeating a call that needs an operator first, to free space or to bring an object back.
RETRY_FULL_S: Final = 30.0


class SyncerError(SkerryError):
    """A refused call. Either nothing was done, or its effect is durable and the same call may be repeated."""


class DrainingError(SyncerError):
    """This replica accepts no new work."""

    def __init__(self) -> None:
        """Tells the caller when to try another replica."""
        super().__init__("DRAINING", "this replica is draining; retry elsewhere", retry_after_s=RETRY_ELSEWHERE_S)


def from_rejection(rejection: Rejection, **metadata: str) -> SyncerError:
    """Returns the error for an item that the fold rejected."""
    return SyncerError(rejection.reason, rejection.detail, metadata=metadata)


def bad_request(message: str) -> SyncerError:
    """Returns the error for a malformed field, which the message names."""
    return SyncerError("BAD_REQUEST", message)
