"""Downloads a version of a fragment: applies a plan's objects while their bytes arrive, and checks the result."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from skerry.algorithm.step import subtract_update
from skerry.client.errors import CorruptDownloadError, PlanExpiredError, TryAgainError, error_of
from skerry.client.transport import Transport
from skerry.runtime.retry import Retry
from skerry.runtime.workers import Workers
from skerry.v1 import exchange_pb2 as v1
from skerry.wire import FragmentLayout, FrameReader, TensorFileReader, WireError, tree_digest


@dataclass(frozen=True)
class Pulled:
    """A version of a fragment whose digest was checked."""

    version: int
    digest: bytes
    weights: NDArray[np.float32]  # (numel,)
    position: int  # that the plan reflects


@dataclass(frozen=True)
class PullSettings:
    """Bounds of one download."""

    stall_timeout_s: float
    retry: Retry


class PlanApplier:
    """Applies a plan's bytes to weights while they arrive; does no I/O. One thread at a time."""

    def __init__(self, layout: FragmentLayout, plan: v1.PullPlan, start: NDArray[np.float32] | None) -> None:
        self.plan = plan
        self._layout = layout
        self._weights = np.zeros(layout.numel, np.float32) if plan.from_version < 0 or start is None else start.copy()
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
        actual = tree_digest(self._weights)
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
            subtract_update(self._weights, batch.data, self._layout)

    def _end_object(self, described: v1.PlanObject) -> None:
        self._reader.finish()
        if self._hasher.digest() != described.digest:
            raise _corrupt(f"object's digest differs. object={described.name}")
        self.object_index += 1
        self._begin_object()


async def pull(
    transport: Transport,
    workers: Workers,
    request: v1.PullFragmentRequest,
    layout: FragmentLayout,
    start: NDArray[np.float32] | None,  # (numel,) the weights of request.from_version; not written to
    *,
    settings: PullSettings,
    count_bytes: Callable[[int], None],
) -> Pulled:
    """Returns the version that the request asks for. A download that breaks is resumed where it broke.

    Raises:
        CorruptDownloadError: bytes or weights are not what their digests say.
        PlanExpiredError: objects were collected meanwhile.
        SkerryError: the last of too many failures in a row without progress.
    """
    applier: PlanApplier | None = None
    begun_at = (0, 0)

    def place() -> tuple[int, int]:
        return (applier.object_index, applier.offset) if applier else (0, 0)

    async def attempt() -> Pulled:
        nonlocal applier, begun_at
        begun_at = place()
        try:
            applier = await _continue(
                transport, workers, request, layout, start, applier=applier, settings=settings, count_bytes=count_bytes
            )
        except _BrokenOffError as broken:
            applier = broken.applier
            if applier is None or not applier.is_complete:
                raise broken.error from broken
        return await workers.run(applier.finish)

    return await replace(settings.retry, has_progressed=lambda: place() != begun_at).call(attempt)


class _BrokenOffError(Exception):
    """A stream ended before its plan was complete; the applied objects stay applied."""

    def __init__(self, error: TryAgainError, applier: PlanApplier | None) -> None:
        super().__init__(str(error))
        self.error = error
        self.applier = applier


async def _continue(
    transport: Transport,
    workers: Workers,
    request: v1.PullFragmentRequest,
    layout: FragmentLayout,
    start: NDArray[np.float32] | None,
    *,
    applier: PlanApplier | None,
    settings: PullSettings,
    count_bytes: Callable[[int], None],
) -> PlanApplier:
    """Opens one stream and applies it to its end."""
    try:
        async with aclosing(transport.pull_fragment(_resumed(request, applier))) as responses:
            while (response := await _next(responses, settings.stall_timeout_s)) is not None:
                if response.HasField("plan"):
                    if applier is None:
                        applier = await workers.run(PlanApplier, layout, response.plan, start)
                    elif list(response.plan.objects) != list(applier.plan.objects):
                        raise PlanExpiredError("PLAN_EXPIRED", "the resumed plan is another one")
                elif applier is None:
                    raise _corrupt("bytes came before their plan")
                else:
                    count_bytes(len(response.data.data))
                    data = response.data
                    await workers.run(applier.feed, data.object_index, data.offset, data.data)
        if applier is None or not applier.is_complete:
            raise error_of("UNREACHABLE", "download ended early")
    except TryAgainError as error:
        raise _BrokenOffError(error, applier) from error
    return applier


async def _next(
    responses: AsyncGenerator[v1.PullFragmentResponse, None], stall_timeout_s: float
) -> v1.PullFragmentResponse | None:
    try:
        async with asyncio.timeout(stall_timeout_s):
            return await anext(responses, None)
    except TimeoutError as error:
        raise error_of("TIMEOUT", f"download stalled. stall_timeout_s={stall_timeout_s}") from error


def _resumed(request: v1.PullFragmentRequest, applier: PlanApplier | None) -> v1.PullFragmentRequest:
    if applier is None:
        return request
    resumed = v1.PullFragmentRequest()
    resumed.CopyFrom(request)
    resumed.is_newest = False
    resumed.from_version = applier.plan.from_version
    resumed.target_version = applier.plan.target.version
    resumed.resume.objects.extend(described.name for described in applier.plan.objects)
    resumed.resume.object_index = applier.object_index
    resumed.resume.offset = applier.offset
    return resumed


def _corrupt(message: str) -> CorruptDownloadError:
    return CorruptDownloadError("CORRUPT_DOWNLOAD", f"download is corrupt: {message}")
