"""Pulls a newer version of a fragment and adopts it.

A plan's objects are applied while their bytes arrive, and the result is checked. Workers prepare the change of the
weights, and the training thread makes it at a step boundary.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from skerry.algorithm.rebase import FlatArray, Ledger
from skerry.algorithm.step import subtract_update
from skerry.client.errors import CorruptDownloadError, PlanExpiredError, TryAgainError, error_of
from skerry.client.parameters import Work
from skerry.client.session import Adoption, Reader, Session
from skerry.client.transport import LANE_COUNT
from skerry.runtime.vectors import vector
from skerry.runtime.workers import in_order
from skerry.v1 import exchange_pb2 as v1
from skerry.wire import FragmentLayout, WireError
from skerry.wire.digests import tree_digest
from skerry.wire.frames import FrameReader
from skerry.wire.safetensors import TensorFileReader


@dataclass(frozen=True)
class Pulled:
    """A version of a fragment whose digest was checked."""

    version: int
    digest: bytes
    weights: NDArray[np.float32]  # (numel,)
    position: int  # that the plan reflects


class PlanApplier:
    """Applies a plan's bytes to weights while they arrive; does no I/O. One thread at a time."""

    def __init__(self, layout: FragmentLayout, plan: v1.PullPlan, start: NDArray[np.float32] | None) -> None:
        self.plan = plan
        start = None if start is None else np.asarray(start)
        self._layout = layout
        self._start: NDArray[np.float32] | None = None  # what updates are subtracted from while they are of one version
        if start is None or plan.from_version < 0:
            self._weights = np.zeros(layout.numel, np.float32)
        elif not plan.objects:
            self._weights = start
        else:
            self._weights, self._start = vector(layout.numel), start
        self.object_index = 0
        self._begin_object()

    def feed(self, object_index: int, offset: int, data: bytes) -> None:
        """Takes the next bytes.

        Raises:
            CorruptDownloadError: they are not the plan's next bytes, or are wrong.
        """
        if object_index != self.object_index or offset != self.offset or self.is_complete:
            raise _corrupt(
                f"bytes out of place. expected={(self.object_index, self.offset)}, at={object_index, offset}"
            )
        self.offset += len(data)
        self._hasher.update(data)
        described = self.plan.objects[object_index]
        if self.offset > described.size_bytes:
            raise _corrupt(f"object is longer than planned. object={described.name}")
        try:
            self._apply(data)
            if self.offset == described.size_bytes:
                self._end_object(described)
        except WireError as error:
            raise _corrupt(f"object can't be read. object={described.name}, cause={error}") from error

    @property
    def is_complete(self) -> bool:
        """Whether every object was applied."""
        return self.object_index == len(self.plan.objects)

    def finish(self) -> Pulled:
        """Returns the target version.

        Raises:
            CorruptDownloadError: the weights are not the target's.
        """
        target = self.plan.target
        actual = tree_digest(self._weights, self._layout.leaf_hash)
        if actual != target.digest:
            raise _corrupt(f"weights differ. version={target.version}, expected={target.digest.hex()}, {actual.hex()=}")
        return Pulled(target.version, target.digest, self._weights, self.plan.position)

    def _begin_object(self) -> None:
        self.offset = 0
        self._hasher = hashlib.sha256()
        if self.is_complete:
            return
        described = self.plan.objects[self.object_index]
        first, numel = described.first, described.numel
        if self._start is not None and described.version > self.plan.from_version + 1:
            self._start = None  # every element was written by the update before
        self._reader: FrameReader | TensorFileReader
        if described.kind == v1.OBJECT_KIND_UPDATE:
            self._reader = FrameReader(first, numel)
        elif described.kind == v1.OBJECT_KIND_SNAPSHOT:
            self._reader = TensorFileReader(self._layout, self._weights, first=first, numel=numel)
        else:
            raise _corrupt(f"kind of object is not known here. object={described.name}, kind={described.kind}")

    def _apply(self, data: bytes) -> None:
        """Subtracts the frames of an update, or copies the tensors of a snapshot, as far as they have arrived."""
        if isinstance(self._reader, TensorFileReader):
            self._reader.feed(data)
            return
        for batch in self._reader.feed(data):
            subtract_update(self._weights, batch.data, self._layout, source=self._start)

    def _end_object(self, described: v1.PlanObject) -> None:
        self._reader.finish()
        if self._hasher.digest() != described.digest:
            raise _corrupt(f"object's digest differs. object={described.name}")
        self.object_index += 1
        self._begin_object()


async def pull_newest(
    session: Reader,
    layout: FragmentLayout,
    *,
    version: int = -1,
    weights: NDArray[np.float32] | None = None,  # (numel,) of `version`; not written to
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
        target_version=target_version or 0,
        is_newest=target_version is None,
    )

    async def attempt(limit_bytes: int) -> Pulled:
        request.limit_bytes = limit_bytes
        download = _Download(session, layout, request, weights)
        retry = replace(session.calls.retry, has_progressed=lambda: download.has_progressed)
        return await retry.call(download.attempt)

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
        start: NDArray[np.float32] | None,  # (numel,) the weights of request.from_version
    ) -> None:
        self._session = session
        self._layout = layout
        self._request = request
        self._start = start
        self._applier: PlanApplier | None = None
        self._begun_at = self._place

    @property
    def _place(self) -> tuple[int, int]:
        return (self._applier.object_index, self._applier.offset) if self._applier else (0, 0)

    @property
    def has_progressed(self) -> bool:
        """Whether the last attempt has applied anything."""
        return self._place != self._begun_at

    async def attempt(self) -> Pulled:
        """Opens one stream, applies it to its end, and returns the version."""
        self._begun_at = self._place
        try:
            await self._receive()
        except TryAgainError:
            if not self._is_complete:
                raise
        if self._applier is None or not self._is_complete:
            raise error_of("UNREACHABLE", "download ended early")
        self._session.saw(self._applier.plan.position)
        pulled = await self._session.workers.run(self._applier.finish)
        self._applier = self._start = None  # the retry loop refers to this in cycles, which keep weights alive
        return pulled

    @property
    def _is_complete(self) -> bool:
        return self._applier is not None and self._applier.is_complete

    async def _receive(self) -> None:
        """Applies what one call sends, and what others fetch beside it of the rest."""
        async with aclosing(self._data(self._resumed())) as pieces:
            if not self._request.limit_bytes:
                async for piece in pieces:
                    await self._apply(piece)
                return

            first = await anext(pieces, None)
            if first is None:
                return

            async def begun(piece: v1.PullData = first) -> list[v1.PullData]:
                return [piece, *[following async for following in pieces]]

            async with aclosing(in_order([begun, *self._fetches()], LANE_COUNT)) as stretches:
                async for stretch in stretches:
                    for piece in stretch:
                        await self._apply(piece)

    def _fetches(self) -> Iterator[Callable[[], Coroutine[Any, Any, list[v1.PullData]]]]:
        """Yields the fetches of all stretches of the plan that the call which brought it does not send."""
        if self._applier is None:
            raise _corrupt("bytes came before their plan")
        index, offset = self._place
        left = self._request.limit_bytes  # of that call, which goes on from object to object
        for at, described in enumerate(self._applier.plan.objects[index:], index):
            sent = min(left, described.size_bytes - offset)
            for start in range(offset + sent, described.size_bytes, self._request.limit_bytes):
                yield partial(self._fetch, at, start)
            left, offset = left - sent, 0

    async def _fetch(self, object_index: int, offset: int) -> list[v1.PullData]:
        """Returns the pieces of one stretch of an object."""
        assert self._applier is not None  # the plan is known
        request = self._resumed(object_index, offset)
        left = min(request.limit_bytes, self._applier.plan.objects[object_index].size_bytes - offset)
        request.limit_bytes = left
        pieces = []
        async with aclosing(self._data(request)) as received:
            async for piece in received:
                pieces.append(piece)
                left -= len(piece.data)
                if left <= 0:  # a syncer of an earlier version goes on
                    return pieces
        raise _corrupt(f"object ends early. object={request.resume.objects[object_index]}")

    async def _apply(self, piece: v1.PullData) -> None:
        if self._applier is None:
            raise _corrupt("bytes came before their plan")
        await self._session.workers.run(self._applier.feed, piece.object_index, piece.offset, piece.data)

    async def _data(self, request: v1.PullFragmentRequest) -> AsyncGenerator[v1.PullData, None]:
        """Yields the pieces that one call sends after its plan, which must be the one that is being applied."""
        session = self._session
        async with aclosing(session.calls.transport.pull_fragment(request)) as responses:
            while (response := await self._next(responses)) is not None:
                if response.HasField("data"):
                    session.tally.bytes_down += len(response.data.data)
                    yield response.data
                elif self._applier is None:
                    self._applier = await session.workers.run(PlanApplier, self._layout, response.plan, self._start)
                elif list(response.plan.objects) != list(self._applier.plan.objects):
                    raise PlanExpiredError("PLAN_EXPIRED", "the resumed plan is another one")

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


def _corrupt(message: str) -> CorruptDownloadError:
    return CorruptDownloadError("CORRUPT_DOWNLOAD", f"download is corrupt: {message}")


async def adopt(
    session: Session, layout: FragmentLayout, ledger: Ledger, pulled: Pulled, *, is_merged: bool, must_replace: bool
) -> Ledger:
    """Returns the ledger after the weights were changed at a step boundary.

    `is_merged`: the delta in flight is in `pulled`; `must_replace`: local work must not be kept.
    """
    on_device = await session.workers.run(session.parameters.from_host, pulled.weights)
    if must_replace or session.settings.adoption is not Adoption.REBASE:
        return await _overwrite(session, layout, ledger, pulled, on_device=on_device, must_replace=must_replace)

    def prepare() -> Work:
        out = vector(layout.numel) if isinstance(on_device, np.ndarray) else None
        shift = ledger.shift(on_device, is_merged=is_merged, out=out)
        session.parameters.synchronize()
        return session.parameters.add(layout, shift)

    add = await session.workers.run(prepare)
    base = on_device
    around = await _change(session, layout, add, is_rounded=not session.parameters.is_float32(layout))
    if around is not None:
        base = await session.workers.run(lambda: ledger.rounded_base(*around, is_merged=is_merged))
    anchor, base = await session.workers.run(kept, session, pulled.weights, base)
    return ledger.rebased(pulled.version, pulled.digest, anchor, base, is_merged=is_merged)


def kept(session: Session, anchor: NDArray[np.float32], base: FlatArray) -> tuple[NDArray[np.float32], FlatArray]:
    """Returns what a ledger holds of anchor and base, once if they are one array."""
    first = session.parameters.keep(anchor)
    return first, first if base is anchor else session.parameters.keep(base)


async def _overwrite(
    session: Session,
    layout: FragmentLayout,
    ledger: Ledger,
    pulled: Pulled,
    *,
    on_device: FlatArray,
    must_replace: bool,
) -> Ledger:
    """Replaces the weights, or blends into them; unsent work is lost."""
    is_blend = session.settings.adoption is Adoption.BLEND and not must_replace
    trained = session.trained
    parameters = session.parameters
    overwrite = (
        parameters.blend(layout, on_device, session.settings.blend_alpha)
        if is_blend
        else parameters.load(layout, on_device)
    )

    def change() -> None:
        nonlocal trained
        overwrite()
        trained = session.trained

    is_rounded = is_blend or not session.parameters.is_float32(layout)
    around = await _change(session, layout, change, is_rounded=is_rounded)
    base = on_device if around is None else around[1]
    anchor, base = await session.workers.run(kept, session, pulled.weights, base)
    return ledger.replaced(pulled.version, pulled.digest, anchor, base, trained)


async def _change(
    session: Session, layout: FragmentLayout, change: Work, *, is_rounded: bool
) -> tuple[FlatArray, FlatArray] | None:
    """Makes the change at a step boundary; if it rounds, returns the weights before and after."""
    parameters = session.parameters

    def changed() -> None:
        change()
        session.changed.append(layout.name)

    if not is_rounded:
        await session.boundary.run(changed)
        return None
    before = await session.workers.run(parameters.buffer, layout)
    after = await session.workers.run(parameters.buffer, layout)

    copy_before = await session.workers.run(parameters.snapshot, layout, before)
    copy_after = await session.workers.run(parameters.snapshot, layout, after)

    def copied() -> None:
        copy_before()
        changed()
        copy_after()

    await session.boundary.run(copied)
    return before, after
