"""Downloads a version of a fragment: over several calls at once, resumed where they break."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

from skerry.algorithm.rebase import FlatArray
from skerry.errors import CorruptDownloadError, PlanExpiredError, TryAgainError, error_of
from skerry.exchange.adopt import PlanApplier, Pulled, corrupt
from skerry.exchange.session import Reader
from skerry.runtime.workers import in_order
from skerry.v1 import exchange_pb2 as v1
from skerry.wire import FragmentLayout

_Piece: TypeAlias = tuple[int, int, bytes]  # index of the object, offset in it, bytes
_Fetch: TypeAlias = Callable[[], Coroutine[Any, Any, list[_Piece]]]


async def pull_newest(
    session: Reader,
    layout: FragmentLayout,
    *,
    version: int = -1,
    weights: FlatArray | None = None,  # (numel,) of `version`; not written to
    target_version: int | None = None,
) -> Pulled:
    """Returns a fragment's newest version, or the target, by way of updates to `weights` or of a snapshot.

    A download that breaks is resumed where it broke.

    Raises:
        CorruptDownloadError: bytes or weights are not what their digests say.
        PlanExpiredError: objects were collected meanwhile.
        SkerryError: the last of too many failures in a row without progress.
    """
    request = v1.PullFragmentRequest(
        run=session.run,
        run_uid=session.run_uid,
        seen_position=session.position,
        fragment=layout.name,
        from_version=-1 if weights is None else version,
        is_newest=True,
    )
    if target_version is not None:
        request.is_newest, request.target_version = False, target_version

    async def attempt(limit_bytes: int) -> Pulled:
        request.limit_bytes = limit_bytes
        return await _Download(session, layout, request, weights).pulled()

    async with session.transfers:
        for limit_bytes in (session.calls.lane_bytes, 0):
            # A syncer notices a damaged object when it reads it as a whole, and then goes around it.
            with suppress(CorruptDownloadError, PlanExpiredError):
                return await attempt(limit_bytes)
        return await attempt(0)


class _Download:
    """One pull, which may take several streams: what was applied stays applied."""

    def __init__(
        self,
        session: Reader,
        layout: FragmentLayout,
        request: v1.PullFragmentRequest,
        start: FlatArray | None,  # (numel,) the weights of request.from_version
    ) -> None:
        self._session = session
        self._layout = layout
        self._request = request
        self._start = start
        self._applier: PlanApplier | None = None  # once the plan is known
        self._lane_count = session.calls.lane_count
        self._begun_at = self._place

    @property
    def _place(self) -> tuple[int, int]:
        return (self._applier.object_index, self._applier.offset) if self._applier else (0, 0)

    def _has_progressed(self) -> bool:
        """Whether the last attempt has applied anything."""
        return self._place != self._begun_at

    async def pulled(self) -> Pulled:
        """Returns the version; streams that break are followed by others."""
        retry = replace(self._session.calls.retry, has_progressed=self._has_progressed)
        try:
            return await retry.call(self._attempt)
        finally:
            self._applier = self._start = None  # the retry loop refers to this in cycles, which keep weights alive

    async def _attempt(self) -> Pulled:
        self._begun_at = self._place
        try:
            await self._receive()
        except TryAgainError:
            if not self._is_complete:
                if not self._has_progressed():  # calls that share a slow link may all be too slow
                    self._lane_count = max(1, self._lane_count // 4)
                raise
        if self._applier is None or not self._is_complete:
            raise error_of("UNREACHABLE", "download ended early")
        plan = self._applier.plan
        self._session.saw(plan.position)
        weights = await self._session.workers.run(self._applier.finish)
        return Pulled(plan.target.version, plan.target.digest, weights)

    @property
    def _is_complete(self) -> bool:
        return self._applier is not None and self._applier.is_complete

    async def _receive(self) -> None:
        """Applies what one call sends, and what others fetch beside it of the rest."""
        async with self._opened(self._resumed()) as pieces:
            if not self._request.limit_bytes:
                async for piece in pieces:
                    await self._apply([piece])
                return
            async with aclosing(in_order(self._fetches(pieces, *self._place), self._lane_count)) as stretches:
                async for stretch in stretches:
                    await self._apply(stretch)

    async def _fetches(self, pieces: AsyncIterator[_Piece], object_index: int, offset: int) -> AsyncIterator[_Fetch]:
        """Yields the fetches of what follows the place; `pieces` are the first `limit_bytes` of it.

        They are made as they are begun: a plan may say of an object that it is larger than any memory.
        """

        async def begun() -> list[_Piece]:
            return [piece async for piece in pieces]

        yield begun
        assert self._applier is not None  # the plan is known
        sent_bytes = limit_bytes = self._request.limit_bytes
        for index, described in enumerate(self._applier.plan.objects[object_index:], object_index):
            sent = min(sent_bytes, described.size_bytes - offset)
            for start in range(offset + sent, described.size_bytes, limit_bytes):
                yield partial(self._fetch, index, start)
            sent_bytes, offset = sent_bytes - sent, 0

    async def _fetch(self, object_index: int, offset: int) -> list[_Piece]:
        """Returns the pieces of one stretch of an object."""
        assert self._applier is not None  # the plan is known
        request = self._resumed(object_index, offset)
        request.limit_bytes = min(request.limit_bytes, self._applier.plan.objects[object_index].size_bytes - offset)
        async with self._opened(request) as received:
            pieces = [piece async for piece in received]
        if not pieces:
            raise corrupt(f"object ends early. object={request.resume.objects[object_index]}")
        return pieces

    async def _apply(self, pieces: Iterable[_Piece]) -> None:
        applier = self._applier
        assert applier is not None  # the plan is known

        def feed() -> None:
            for piece in pieces:
                applier.feed(*piece)

        await self._session.workers.run(feed)

    @asynccontextmanager
    async def _opened(self, request: v1.PullFragmentRequest) -> AsyncIterator[AsyncIterator[_Piece]]:
        """Opens a call, takes its plan, which must be the one that is being applied, and yields what it sends then."""
        session = self._session
        async with aclosing(session.calls.transport.pull_fragment(request)) as responses:
            if (response := await self._next(responses)) is None:
                raise error_of("UNREACHABLE", "download ended before its plan")
            if self._applier is None:
                self._applier = await session.workers.run(PlanApplier, self._layout, response.plan, self._start)
            elif list(response.plan.objects) != list(self._applier.plan.objects):
                raise PlanExpiredError("PLAN_EXPIRED", "the resumed plan is another one")
            yield self._data(responses)

    async def _data(self, responses: AsyncGenerator[v1.PullFragmentResponse, None]) -> AsyncIterator[_Piece]:
        while (response := await self._next(responses)) is not None:
            message, data = response.data, response.data.data  # a copy at each access
            self._session.tally.bytes_down += len(data)
            yield message.object_index, message.offset, data

    async def _next(self, responses: AsyncGenerator[v1.PullFragmentResponse, None]) -> v1.PullFragmentResponse | None:
        stall_timeout_s = self._session.calls.stall_timeout_s
        try:
            async with asyncio.timeout(stall_timeout_s):
                return await anext(responses, None)
        except TimeoutError as error:
            raise error_of("TIMEOUT", f"download stalled. stall_timeout_s={stall_timeout_s}") from error

    def _resumed(self, *place: int) -> v1.PullFragmentRequest:
        """Returns the request for what follows `place`, or what was applied so far."""
        applier = self._applier
        if applier is None:
            return self._request
        resumed = v1.PullFragmentRequest()
        resumed.CopyFrom(self._request)
        resumed.is_newest = False
        resumed.from_version = applier.plan.from_version
        resumed.target_version = applier.plan.target.version
        resumed.resume.objects.extend(described.name for described in applier.plan.objects)
        resumed.resume.object_index, resumed.resume.offset = place or self._place
        return resumed
