"""Bringing a fragment to a newer version: a plan, its objects' bytes as they come, and proof of the result."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from skerry.client.errors import CorruptDownloadError, PlanExpiredError, TryAgainError, error_of
from skerry.client.transport import Transport
from skerry.runtime.retry import Retry
from skerry.runtime.workers import Workers
from skerry.v1 import exchange_pb2 as v1
from skerry.wire import HEADER_SIZE, FragmentLayout, FrameError, decode_frame, frame_size, parse_frames, tree_digest

# What a safetensors header may take; a larger one is no snapshot of ours.
_MAX_TENSOR_HEADER_BYTES: Final = 2**26


@dataclass(frozen=True)
class Pulled:
    """A version of a fragment, checked."""

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
    """Applies a plan's bytes to weights as they come; does no I/O. One thread at a time."""

    def __init__(self, layout: FragmentLayout, plan: v1.PullPlan, start: NDArray[np.float32] | None) -> None:
        self.plan = plan
        self._layout = layout
        self._weights = np.zeros(layout.numel, np.float32) if plan.from_version < 0 or start is None else start.copy()
        self.object_index = 0
        self._begin_object()

    def feed(self, object_index: int, offset: int, data: bytes) -> None:
        """Takes the next bytes.

        Raises:
            CorruptDownloadError: they are out of place or wrong.
        """
        if object_index != self.object_index or offset != self.offset or self.is_complete:
            raise _corrupt(
                f"bytes out of place. expected={(self.object_index, self.offset)}, at={object_index, offset}"
            )
        self.offset += len(data)
        self._hasher.update(data)
        self._buffer += data
        described = self.plan.objects[object_index]
        if self.offset > described.size_bytes:
            raise _corrupt(f"object is longer than planned. object={described.name}")
        if described.kind == v1.OBJECT_KIND_UPDATE:
            self._apply_frames(described)
        elif described.kind == v1.OBJECT_KIND_SNAPSHOT:
            self._apply_tensors(described)
        else:
            raise _corrupt(f"object of a kind not known here. kind={described.kind}")
        if self.offset == described.size_bytes:
            self._end_object(described)

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
        self._buffer = bytearray()
        self._applied_numel = 0
        self._places: list[tuple[int, int, int]] | None = None  # of a snapshot: (byte, end byte, first element)

    def _end_object(self, described: v1.PlanObject) -> None:
        if self._hasher.digest() != described.digest:
            raise _corrupt(f"object's digest differs. object={described.name}")
        if self._applied_numel != described.numel or self._buffer:
            raise _corrupt(f"object does not hold its range. object={described.name}, numel={self._applied_numel}")
        self.object_index += 1
        self._begin_object()

    def _apply_frames(self, described: v1.PlanObject) -> None:
        """Theta <- Theta - decode(update), frame by frame."""
        try:
            while len(self._buffer) >= HEADER_SIZE:
                size = frame_size(bytes(self._buffer[:HEADER_SIZE]))
                if len(self._buffer) < size:
                    return
                (frame,) = parse_frames(bytes(self._buffer[:size]))
                if frame.first != described.first + self._applied_numel:
                    raise _corrupt(f"frame out of place. object={described.name}, first={frame.first}")
                self._weights[frame.first : frame.first + frame.numel] -= decode_frame(frame, self._layout)
                self._applied_numel += frame.numel
                del self._buffer[:size]
        except FrameError as error:
            raise _corrupt(f"frame can't be read. object={described.name}, because={error}") from error

    def _apply_tensors(self, described: v1.PlanObject) -> None:
        """Theta <- the file's tensors; whatever of them has come."""
        if self._places is None:
            header_size = 8 + int.from_bytes(self._buffer[:8], "little")
            if header_size > _MAX_TENSOR_HEADER_BYTES:
                raise _corrupt(f"no safetensors file. object={described.name}")
            if len(self._buffer) < max(header_size, 9):
                return
            try:
                self._places = self._tensor_places(described, json.loads(self._buffer[8:header_size]))
            except (ValueError, TypeError, AttributeError) as error:
                raise _corrupt(f"header can't be read. object={described.name}, because={error!r}") from error
            del self._buffer[:header_size]
        whole = len(self._buffer) // 4 * 4
        piece = np.frombuffer(bytes(self._buffer[:whole]), "<f4")
        at = 4 * self._applied_numel
        for begin, end, first in self._places:
            low, high = max(begin, at), min(end, at + whole)
            if low < high:
                element = first + (low - begin) // 4
                self._weights[element : element + (high - low) // 4] = piece[(low - at) // 4 : (high - at) // 4]
        self._applied_numel += whole // 4
        del self._buffer[:whole]

    def _tensor_places(self, described: v1.PlanObject, header: dict[str, Any]) -> list[tuple[int, int, int]]:
        places = []
        for index, start, stop in self._layout.ranges(described.first, described.numel):
            spec = self._layout.tensors[index]
            entry = header.get(spec.name, {})
            begin, end = entry.get("data_offsets", (0, 0))
            if entry.get("dtype") != "F32" or end - begin != 4 * (stop - start):
                raise _corrupt(f"tensor does not fit. object={described.name}, tensor={spec.name}, entry={entry}")
            places.append((begin, end, start))
        return places


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
    """Returns the version that the request asks for; a download that breaks goes on where it broke.

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
    """A stream ended before its plan did; what was applied stands."""

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
        raise error_of("TIMEOUT", f"download made no progress. stall_timeout_s={stall_timeout_s}") from error


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
