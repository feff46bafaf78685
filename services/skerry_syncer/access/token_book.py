"""The tokens that this replica accepts: those of the store, which it looks through every few seconds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final, Self

from skerry.runtime.clock import Clock
from skerry.runtime.logs import get_logger
from skerry.wire.identity import Identity
from skerry_syncer.errors import SyncerError
from skerry_syncer.store.errors import StoreError, StoreUnavailableError
from skerry_syncer.store.objects.interface import Objects
from skerry_syncer.store.tokens import Token, read_token, token_digest, token_digests

_LOG: Final = get_logger(__name__)
# A token is honoured, and a revoked one refused, within 10 s: this, and the time that a listing takes.
POLL_S: Final = 5.0
# A store answers in tens of milliseconds: one by one, a syncer with 1000 tokens would start half a minute later.
_READS_AT_ONCE: Final = 32


class TokenBook:
    """Tokens by their digest; `begin` comes first, then `follow` in a task.

    While the store can't be reached, what was known stays valid.
    """

    def __init__(self, objects: Objects, clock: Clock) -> None:
        """Knows no token before `begin`."""
        self._objects = objects
        self._clock = clock
        self._tokens: dict[str, Token] = {}
        self._calls: set[tuple[str, asyncio.Timeout]] = set()

    async def begin(self) -> Self:
        """Returns this when the store's tokens are known: until then their calls would be refused."""
        while not await self._looked():
            await self._clock.sleep(POLL_S)
        return self

    async def follow(self) -> None:
        """Reads the store's tokens again in an endless loop."""
        while True:
            await self._clock.sleep(POLL_S)
            await self._looked()

    async def _looked(self) -> bool:
        try:
            return await self.refresh()
        except StoreError as error:
            _LOG.warning("tokens can't be read, will try again; those that are known stay valid", cause=str(error))
            return False

    async def refresh(self) -> bool:
        """Adds new tokens, and ends the calls of tokens that were revoked or have expired.

        Returns whether the store answered for all of them.
        """
        found = {digest async for digest in token_digests(self._objects)}
        for digest in sorted(self._tokens.keys() - found):
            _LOG.info("token was revoked", token=digest[:12], identity=self._tokens.pop(digest).identity.client)
        for call in [call for call in self._calls if self._valid(call[0]) is None]:
            self._calls.discard(call)
            call[1].reschedule(0.0)
        new, is_complete = sorted(found - self._tokens.keys()), True
        for first in range(0, len(new), _READS_AT_ONCE):
            is_complete &= all(await asyncio.gather(*map(self._learn, new[first : first + _READS_AT_ONCE])))
        return is_complete

    async def _learn(self, digest: str) -> bool:
        try:
            self._tokens[digest] = token = await read_token(self._objects, digest)
            _LOG.info("token is known", token=digest[:12], identity=token.identity.client)
        except (StoreError, ValueError) as error:
            _LOG.warning("a token can't be read and is not accepted", token=digest[:12], cause=str(error))
            return not isinstance(error, StoreUnavailableError)
        return True

    @asynccontextmanager
    async def calling(self, token: str) -> AsyncIterator[Identity]:
        """Yields whose token it is; cancels what runs in the context when the token stops being valid.

        Raises:
            SyncerError: UNAUTHENTICATED: it is not valid, or not any more.
        """
        digest = token_digest(token)
        found = self._valid(digest)
        invalid = SyncerError(
            "UNAUTHENTICATED",
            "the token is not known here, was revoked or has expired; `skerry tokens create` makes a new one, which "
            f"every syncer knows within 10 s. token={digest[:12]}",
        )
        if found is None:
            raise invalid
        end = asyncio.timeout(None)
        call = (digest, end)
        try:
            async with end:
                self._calls.add(call)
                try:
                    yield found.identity
                finally:
                    self._calls.discard(call)
        except TimeoutError as error:
            raise invalid if end.expired() else error from error

    def knows(self, token: str) -> bool:
        """Whether the token is valid."""
        return self._valid(token_digest(token)) is not None

    def _valid(self, digest: str) -> Token | None:
        token = self._tokens.get(digest)
        return token if token is not None and self._clock.unix_s() < token.expires_at_unix_s else None
