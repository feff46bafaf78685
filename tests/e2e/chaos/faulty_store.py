"""A `file://` store with a `Board` in front of it, inside a replica's own process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TypeVar

from skerry_syncer.store.errors import StoreFullError, StoreUnavailableError
from skerry_syncer.store.objects.interface import Chunks, ObjectInfo
from skerry_syncer.store.objects.local import TEMPORARY, LocalObjects
from tests.e2e.chaos.points import Board, Deed, Moment, Strike, operation_of
from tests.support.dict_objects import joined

R = TypeVar("R")


class FaultyStore:
    """One replica's way to the store (`skerry_syncer.store.objects.interface.Objects`)."""

    def __init__(self, inner: LocalObjects, board: Board) -> None:
        self._inner = inner
        self._board = board

    async def create(self, name: str, data: bytes) -> None:
        """Puts an object that must not exist."""
        await self._call("create", name, lambda: self._inner.create(name, data), lambda: self._litter(data))

    async def get(self, name: str, *, length: int | None = None) -> bytes:
        """Returns the object's bytes."""
        return await self._call("get", name, lambda: self._inner.get(name, length=length))

    async def write(self, name: str, chunks: Chunks) -> int:
        """Puts a blob."""
        data = await joined(chunks)
        return await self._call("write", name, lambda: self._inner.write(name, data), lambda: self._litter(data))

    async def stream(self, name: str, *, offset: int = 0) -> AsyncIterator[bytes]:
        """Yields the object's bytes; where it is torn, the first half of them."""
        strike = await self._begin("stream", name)
        if strike is not None and strike.moment is Moment.BEFORE:
            raise self._struck(strike, name)
        async for piece in self._inner.stream(name, offset=offset):
            if strike is not None and strike.moment is Moment.TORN:
                yield piece[: len(piece) // 2]
                raise self._struck(strike, name)
            yield piece
        if strike is not None:
            raise self._struck(strike, name)

    async def folders(self, prefix: str) -> list[str]:
        """Returns the folders directly below `prefix`."""
        return await self._call("folders", prefix, lambda: self._inner.folders(prefix))

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        """Yields every object below `prefix`; where it is torn, the first half of them."""
        strike = await self._begin("list", prefix)
        if strike is not None and strike.moment is Moment.BEFORE:
            raise self._struck(strike, prefix)
        found = [info async for info in self._inner.list(prefix)]
        is_torn = strike is not None and strike.moment is Moment.TORN
        for info in found[: len(found) // 2] if is_torn else found:
            yield info
        if strike is not None:
            raise self._struck(strike, prefix)

    async def delete(self, names: Sequence[str]) -> None:
        """Deletes these objects; where it is torn, the first half of them."""
        await self._call(
            "delete",
            names[0] if names else "",
            lambda: self._inner.delete(names),
            lambda: self._inner.delete(names[: len(names) // 2]),
        )

    async def sync_parent(self, *names: str) -> None:
        """Syncs the folder of `name`."""
        await self._call("sync_parent", names[-1], lambda: self._inner.sync_parent(*names))

    async def _call(
        self,
        verb: str,
        name: str,
        act: Callable[[], Awaitable[R]],
        tear: Callable[[], Awaitable[object]] | None = None,
    ) -> R:
        strike = await self._begin(verb, name)
        if strike is None:
            return await act()
        if strike.moment is Moment.AFTER:
            await act()
        elif strike.moment is Moment.TORN and tear is not None:
            await tear()
        raise self._struck(strike, name)

    async def _begin(self, verb: str, name: str) -> Strike | None:
        if pause_s := self._board.pause_s():
            await asyncio.sleep(pause_s)
        return self._board.strike(operation_of(verb, name))

    @staticmethod
    def _struck(strike: Strike, name: str) -> StoreUnavailableError | StoreFullError:
        """Returns the error that the caller hears, or never returns."""
        if strike.deed is Deed.KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        kind = StoreFullError if strike.is_full else StoreUnavailableError
        return kind(f"fault was injected. moment={strike.moment}, name={name}")

    async def _litter(self, data: bytes) -> None:
        """Leaves what a writer leaves that dies while it writes: half a file that has no name yet."""
        folder = self._inner.root / TEMPORARY
        with contextlib.suppress(OSError):  # the disk is full
            folder.mkdir(exist_ok=True)
            (folder / secrets.token_hex(16)).write_bytes(data[: len(data) // 2])
