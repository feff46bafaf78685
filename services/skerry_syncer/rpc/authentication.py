"""Identifies the caller and checks whether its role allows the call; `skerry_syncer.access.roles` has the table."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import grpc

from skerry.wire.identity import SCHEME, Identity, Role
from skerry_syncer.access.caller import CALLER, Caller
from skerry_syncer.access.limits import Calls
from skerry_syncer.access.roles import check_message, check_role
from skerry_syncer.access.token_book import TokenBook
from skerry_syncer.errors import SyncerError


class Authentication:
    """Admits calls by the token that they carry; without one, by the client's certificate."""

    def __init__(self, tokens: TokenBook | None, *, wants_run: bool = False) -> None:
        """Without `tokens` a token counts for nothing. With `wants_run` a learner's identity must name the run."""
        self._tokens = tokens
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
        token = _token(context)
        async with AsyncExitStack() as stack:
            if self._tokens is None or token is None:
                caller = _named_by_certificate(context)
            else:
                caller = await stack.enter_async_context(self._tokens.calling(token))
            learner = caller.name if caller.role is Role.LEARNER else ""
            CALLER.set(Caller(caller.client, learner, context.peer() or "", caller.weight, caller.run))
            check_role(method, caller)
            stack.enter_context(self._calls.under_way(caller.client))
            yield partial(check_message, method, caller, wants_run=self._wants_run)

    def knows(self, context: grpc.aio.ServicerContext[Any, Any]) -> bool:
        """Whether the caller has an identity, in whatever role."""
        try:
            self.check_known(context)
        except SyncerError:
            return False
        return True

    def check_known(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Raises SyncerError, UNAUTHENTICATED, if the caller has no identity."""
        token = _token(context)
        if self._tokens is None or token is None:
            _named_by_certificate(context)
        elif not self._tokens.knows(token):
            raise SyncerError("UNAUTHENTICATED", "the token is not known, was revoked or has expired")


def _token(context: grpc.aio.ServicerContext[Any, Any]) -> str | None:
    metadata: Any = context.invocation_metadata()  # pairs; its published type is not iterable
    for key, value in metadata or ():
        scheme, _, token = value.partition(" ") if key == "authorization" else ("", "", "")
        if scheme.lower() == "bearer":
            return str(token)
    return None


def _named_by_certificate(context: grpc.aio.ServicerContext[Any, Any]) -> Identity:
    # The names of other kinds are not looked at: only a URI that the authority signed as one is an identity.
    uris = [uri.decode(errors="replace") for uri in context.auth_context().get("peer_uri", ())]
    found = [uri for uri in uris if uri.startswith(SCHEME)]
    if len(found) != 1:
        raise SyncerError(
            "UNAUTHENTICATED",
            "nothing says who the client is: give a certificate with exactly one skerry:// URI, from `skerry keys`, or "
            f"where the server takes tokens one from `skerry tokens`. uris={found}",
        )
    try:
        return Identity.parse(found[0])
    except ValueError as error:
        raise SyncerError("UNAUTHENTICATED", f"the client's certificate names no legal identity. {error}") from error
