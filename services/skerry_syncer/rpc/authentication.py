"""Identifies the caller and checks whether its role allows the call; `skerry_syncer.access.roles` has the table."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import grpc

from skerry.wire.identity import SCHEME, Identity, Role
from skerry_syncer.access.caller import CALLER, Caller
from skerry_syncer.access.limits import Calls
from skerry_syncer.access.roles import check_message, check_role
from skerry_syncer.errors import SyncerError


class Authentication:
    """Admits calls by the client's certificate."""

    def __init__(self, *, wants_run: bool = False) -> None:
        """With `wants_run` a learner's identity must name the run."""
        self._wants_run = wants_run
        self._calls = Calls()

    @asynccontextmanager
    async def admitted(
        self, method: str, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[Callable[[Any], None]]:
        """Yields what checks the call's first message, for as long as the call lasts.

        Raises:
            SyncerError: UNAUTHENTICATED: nothing says who the caller is; PERMISSION_DENIED; QUOTA_EXCEEDED.
        """
        caller = named_by_certificate(context)
        learner = caller.name if caller.role is Role.LEARNER else ""
        CALLER.set(Caller(str(caller), learner, context.peer() or "", caller.run))
        check_role(method, caller)
        with self._calls.under_way(str(caller)):
            yield partial(check_message, method, caller, wants_run=self._wants_run)

    def knows(self, context: grpc.aio.ServicerContext[Any, Any]) -> bool:
        """Whether the caller has an identity, in whatever role."""
        try:
            named_by_certificate(context)
        except SyncerError:
            return False
        return True


def named_by_certificate(context: grpc.aio.ServicerContext[Any, Any]) -> Identity:
    """Returns the identity of a call's client; raises SyncerError, UNAUTHENTICATED, if it has none."""
    # The names of other kinds are not looked at: only a URI that the authority signed as one is an identity.
    uris = [uri.decode(errors="replace") for uri in context.auth_context().get("peer_uri", ())]
    found = [uri for uri in uris if uri.startswith(SCHEME)]
    if len(found) != 1:
        raise SyncerError(
            "UNAUTHENTICATED",
            "the client's certificate does not say who it is: give one with exactly one skerry:// URI, as "
            f"`skerry keys` makes it. uris={found}",
        )
    try:
        return Identity.parse(found[0])
    except ValueError as error:
        raise SyncerError("UNAUTHENTICATED", f"the client's certificate names no legal identity. {error}") from error
