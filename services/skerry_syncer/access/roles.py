"""Which role each method of `skerry.v1` needs, and for which learner its message may speak: the only such table.

An admin may do everything but speak for a learner: it neither attaches nor pushes deltas, except the initial weights of
a run that it creates, which belong to no learner. A learner speaks for its own id only. One whose identity names a run
sees and creates that run only, and can't list the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any, Final, NamedTuple

from skerry.wire.identity import Identity, Role
from skerry_syncer.errors import SyncerError
from skerry_syncer.store.log.entries import INITIAL_BASE

_ADMIN: Final = frozenset({Role.ADMIN})
_LEARNER: Final = frozenset({Role.LEARNER})
_READER: Final = frozenset({Role.READER})


class Rule(NamedTuple):
    """Which callers may call a method."""

    roles: frozenset[Role]
    run: Callable[[Any], str] | None = None  # the run that the first message names; None: no run, or any
    learner: Callable[[Any], str | None] | None = None  # the learner that it speaks for, where it speaks for one


def _pushing_learner(message: Any) -> str | None:
    """Returns the learner whose delta it is; None for initial weights, which only the draft's creator can send."""
    return None if message.header.base_version == INITIAL_BASE else message.header.learner_id


_NAME: Final = attrgetter("name")
_RUN: Final = attrgetter("run")
RULES: Final[Mapping[str, Rule]] = {
    "Capabilities/GetCapabilities": Rule(_ADMIN | _LEARNER | _READER),
    "Exchange/Attach": Rule(_LEARNER, attrgetter("hello.run"), attrgetter("hello.learner_id")),
    "Exchange/PushDelta": Rule(_ADMIN | _LEARNER, attrgetter("header.run"), _pushing_learner),
    "Exchange/QueryPush": Rule(_ADMIN | _LEARNER, _RUN),
    "Exchange/PullFragment": Rule(_ADMIN | _LEARNER | _READER, _RUN),
    "Exchange/Watch": Rule(_ADMIN | _LEARNER | _READER, _RUN),
    "Runs/CreateRun": Rule(_ADMIN | _LEARNER, _NAME),
    "Runs/CommitRun": Rule(_ADMIN | _LEARNER, _NAME),
    "Runs/GetRun": Rule(_ADMIN | _LEARNER | _READER, _NAME),
    "Runs/ListVersions": Rule(_ADMIN | _LEARNER | _READER, _NAME),
    "Runs/ListRuns": Rule(_ADMIN | _READER),
    "Runs/ReportMetrics": Rule(_ADMIN | _LEARNER, _NAME),
    "Runs/SetPolicy": Rule(_ADMIN),
    "Runs/SetEjection": Rule(_ADMIN),
    "Runs/RollBack": Rule(_ADMIN),
    "Runs/CloseRun": Rule(_ADMIN),
    "Runs/DeleteRun": Rule(_ADMIN),
}


def check_role(method: str, caller: Identity) -> None:
    """Returns if the caller may call the method.

    Raises:
        SyncerError: PERMISSION_DENIED.
    """
    roles = RULES[method].roles
    if caller.role not in roles:
        needed = ", ".join(sorted(roles))
        raise SyncerError("PERMISSION_DENIED", f"the role may not do this. caller={caller}, needed={needed}")


def check_message(method: str, caller: Identity, message: Any) -> None:
    """Returns if the caller may send the message, which is the first of a stream.

    Raises:
        SyncerError: PERMISSION_DENIED: it is about another run than the caller's, or speaks for another learner.
    """
    rule = RULES[method]
    if caller.run and rule.run is not None and rule.run(message) != caller.run:
        raise SyncerError("PERMISSION_DENIED", f"this is another run than the caller's. caller={caller}")
    spoken_for = None if rule.learner is None else rule.learner(message)
    if spoken_for is not None and (caller.role, caller.name) != (Role.LEARNER, spoken_for):
        raise SyncerError("PERMISSION_DENIED", f"only the learner itself may do this. caller={caller}")
