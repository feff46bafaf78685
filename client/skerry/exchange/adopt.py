"""Brings a model to a newer version of a fragment.

A plan's objects are applied while their bytes arrive, and the result is checked. Workers prepare the change of the
weights, and the training thread makes it at a step boundary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from skerry.algorithm.rebase import FlatArray, Ledger
from skerry.algorithm.step import subtract_update
from skerry.errors import CorruptDownloadError
from skerry.exchange.session import Session
from skerry.model.interface import Parameters, Work
from skerry.runtime.vectors import vector
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
    weights: FlatArray  # (numel,)


class PlanApplier:
    """Applies a plan's bytes to weights while they arrive; does no I/O. One thread at a time."""

    def __init__(
        self,
        layout: FragmentLayout,
        plan: v1.PullPlan,
        start: FlatArray | None,  # (numel,) the weights of plan.from_version
    ) -> None:
        self.plan = plan
        self._layout = layout
        self._start: NDArray[np.float32] | None = None  # what updates are subtracted from while they are of one version
        if start is None or plan.from_version < 0:
            self._weights = np.zeros(layout.numel, np.float32)
        elif not plan.objects:
            self._weights = np.asarray(start)
        else:
            self._weights = vector(layout.numel)
            self._start = np.asarray(start)
        self.object_index = 0
        self._begin_object()

    def feed(self, object_index: int, offset: int, data: bytes | memoryview) -> None:
        """Takes the next bytes.

        Raises:
            CorruptDownloadError: they are not the plan's next bytes, or are wrong.
        """
        if object_index != self.object_index or offset != self.offset or self.is_complete:
            raise corrupt(
                f"bytes out of place. expected={(self.object_index, self.offset)}, received={object_index, offset}"
            )
        self.offset += len(data)
        described = self.plan.objects[object_index]
        if self.offset > described.size_bytes:
            raise corrupt(f"object is longer than planned. object={described.name}")
        try:
            self._apply(data)
            if self.offset == described.size_bytes:
                self._end_object(described)
        except WireError as error:
            raise corrupt(f"object can't be read. object={described.name}, cause={error}") from error

    @property
    def is_complete(self) -> bool:
        """Whether every object was applied."""
        return self.object_index == len(self.plan.objects)

    def finish(self) -> NDArray[np.float32]:
        """Returns the target's weights, `(numel,)`.

        Raises:
            CorruptDownloadError: the weights are not the target's.
        """
        target, digest = self.plan.target, tree_digest(self._weights)
        if digest != target.digest:
            raise corrupt(f"weights differ. version={target.version}, expected={target.digest.hex()}, {digest.hex()=}")
        return self._weights

    def _begin_object(self) -> None:
        self.offset = 0
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
            raise corrupt(f"kind of object is not known here. object={described.name}, kind={described.kind}")

    def _apply(self, data: bytes | memoryview) -> None:
        """Subtracts the frames of an update, or copies the tensors of a snapshot, as far as they have arrived."""
        if isinstance(self._reader, TensorFileReader):
            self._reader.feed(data)
            return
        for batch in self._reader.feed(data):
            subtract_update(self._weights, batch.data, self._layout, source=self._start)

    def _end_object(self, described: v1.PlanObject) -> None:
        self._reader.finish()
        self.object_index += 1
        self._begin_object()


def corrupt(message: str) -> CorruptDownloadError:
    """Returns the error for bytes or weights that are not what they must be."""
    return CorruptDownloadError("CORRUPT_DOWNLOAD", f"download is corrupt: {message}")


def load(parameters: Parameters, layout: FragmentLayout, weights: FlatArray) -> FlatArray:
    """Overwrites the model's weights, `(numel,)`, and returns them as it holds them."""
    parameters.load(layout, weights)()
    if parameters.is_float32(layout):
        return weights
    held = parameters.buffer(layout)
    parameters.snapshot(layout, held)()
    return held


async def adopt(session: Session, layout: FragmentLayout, ledger: Ledger, pulled: Pulled, *, is_merged: bool) -> Ledger:
    """Returns the ledger after the weights were changed at a step boundary; `pulled` has the delta if `is_merged`."""
    parameters, run = session.parameters, session.workers.run
    on_device = await run(parameters.from_host, pulled.weights)

    def prepare() -> Work:
        out = vector(layout.numel) if isinstance(on_device, np.ndarray) else None
        shift = ledger.shift(on_device, is_merged=is_merged, out=out)
        parameters.synchronize()
        return parameters.add(layout, shift)

    around = await _change(session, layout, await run(prepare))
    base = on_device
    if around is not None:
        base = await run(lambda: ledger.rounded_base(*around, is_merged=is_merged))
    return ledger.rebased(pulled.version, pulled.digest, pulled.weights, base, is_merged=is_merged)


async def _change(session: Session, layout: FragmentLayout, change: Work) -> tuple[FlatArray, FlatArray] | None:
    """Makes the change at a step boundary; where the model rounds, returns the weights before and after."""
    parameters, run = session.parameters, session.workers.run

    def changed() -> None:
        change()
        session.changed.append(layout.name)

    if parameters.is_float32(layout):
        await session.boundary.run(changed)
        return None
    before, after = await run(parameters.buffer, layout), await run(parameters.buffer, layout)
    copy_before = await run(parameters.snapshot, layout, before)
    copy_after = await run(parameters.snapshot, layout, after)

    def copied() -> None:
        copy_before()
        changed()
        copy_after()

    await session.boundary.run(copied)
    await run(parameters.synchronize)  # workers read the copies next
    return before, after
