"""The client whose call is being served; the interceptor sets it."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Final

from skerry.wire.identity import Identity, Role
from skerry.wire.policy import Policy
from skerry_syncer.errors import SyncerError

# Set in the task of each call, and inherited by the tasks that it starts; None where the server has no roles.
CALLER: Final[ContextVar[Identity | None]] = ContextVar("CALLER", default=None)


def author() -> str:
    """Returns the identity that is recorded as the author of a change; empty where the server has no roles."""
    caller = CALLER.get()
    return "" if caller is None else str(caller)


def calling_learner() -> str:
    """Returns the learner id that the caller is bound to; empty where it is no learner."""
    caller = CALLER.get()
    return caller.name if caller is not None and caller.role is Role.LEARNER else ""


def only_run() -> str:
    """Returns the one run that the caller may use; empty: any."""
    caller = CALLER.get()
    return "" if caller is None else caller.run


def check_enrolled(policy: Policy) -> None:
    """Raises SyncerError, PERMISSION_DENIED, if the run takes only learners whose certificate names it."""
    if policy.enrols_by_run and calling_learner() and not only_run():
        message = f"the run takes only learners whose certificate names it. caller={author()}"
        raise SyncerError("PERMISSION_DENIED", message)
