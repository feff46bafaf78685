"""The client whose call is being served, for counts and records by caller; the interceptor sets it."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final

from skerry_syncer.errors import SyncerError
from skerry_syncer.store.log.state import RunState


@dataclass(frozen=True)
class Caller:
    """The client of one call."""

    identity: str = ""  # as in its certificate or token; empty where the server has no roles
    learner: str = ""  # the id that it is bound to, of a learner
    peer: str = ""  # its connection
    run: str = ""  # the only one that it may use; empty: any

    @property
    def sender(self) -> str:
        """Whose share of the syncer's memory the call takes."""
        return self.identity or self.peer

    @property
    def address(self) -> str:
        """The machine that it calls from, or the last one on the way."""
        return self.peer.rpartition(":")[0]


# Set in the task of each call, and inherited by the tasks that it starts.
_NOBODY: Final = Caller()
CALLER: Final[ContextVar[Caller]] = ContextVar("CALLER", default=_NOBODY)


def author() -> str:
    """Returns the identity that is recorded as the author of a change; empty where the server has no roles."""
    return CALLER.get().identity


def check_enrolled(state: RunState) -> None:
    """Refuses a learner that the run does not take.

    Raises:
        SyncerError: PERMISSION_DENIED: the run wants learners whose identity names it.
    """
    caller = CALLER.get()
    if state.policy.enrols_by_run and caller.learner and not caller.run:
        message = f"the run takes only learners that were enrolled in it. caller={caller.identity}, run=any"
        raise SyncerError("PERMISSION_DENIED", message)
