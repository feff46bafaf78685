"""The inner products of a round's deltas, which are all that the geometric median takes of them.

The deltas are decoded side by side, a tile of each at a time, so that memory holds a tile and a batch of frames for
each member, however large the fragment.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import Final

import numpy as np
from numpy.typing import NDArray

from skerry.algorithm.median import add_products
from skerry.runtime.workers import Workers
from skerry.wire.errors import FrameError
from skerry.wire.frames import decode_frame, parse_frames
from skerry.wire.layout import FragmentLayout
from skerry_syncer.store.errors import ObjectMissingError, UnreadableObjectError
from skerry_syncer.store.log.entries import AcceptedItem
from skerry_syncer.store.log.run_log import RunLog
from skerry_syncer.store.versions.blobs import frame_batches
from skerry_syncer.store.versions.replay import UnreadableDeltaError

Values = NDArray[np.float32]
_TILE_NUMEL: Final = 2**16


async def inner_products(
    log: RunLog, fragment: str, deltas: Sequence[AcceptedItem], *, workers: Workers
) -> NDArray[np.float64]:  # (tensors, members, members)
    """Returns <v_jt, v_kt> of the deltas j and k in each tensor t.

    Raises:
        UnreadableDeltaError: a delta can't be read back.
        StoreUnavailableError: the store can't say; the same call may succeed later.
    """
    layout = log.spec.fragment(fragment)
    products = np.zeros((len(layout.tensors), len(deltas), len(deltas)))
    tile = np.empty((len(deltas), min(_TILE_NUMEL, layout.numel)), np.float32)
    async with AsyncExitStack() as stack:
        readers = []
        for delta in deltas:
            values = await stack.enter_async_context(aclosing(_decoded(log, layout, delta, workers)))
            readers.append(_Reader(delta, values))
        for first in range(0, layout.numel, _TILE_NUMEL):
            rows = tile[:, : min(_TILE_NUMEL, layout.numel - first)]
            for reader, row in zip(readers, rows, strict=True):
                await reader.fill(row)
            await workers.run(_add, products, rows, layout, first)
    return products


def _add(products: NDArray[np.float64], rows: Values, layout: FragmentLayout, first: int) -> None:
    for tensor, start, stop in layout.ranges(first, rows.shape[1]):
        add_products(products, rows[:, start - first : stop - first], tensor)


class _Reader:
    """Cuts the values of one delta as they are asked for."""

    def __init__(self, delta: AcceptedItem, values: AsyncGenerator[Values, None]) -> None:
        self._delta = delta
        self._values = values
        self._rest = np.empty(0, np.float32)

    async def fill(self, row: Values) -> None:
        """Writes the next elements to `row`."""
        at = 0
        while at < len(row):
            if not len(self._rest):
                try:
                    self._rest = await anext(self._values)
                except (FrameError, ObjectMissingError, UnreadableObjectError) as error:
                    raise UnreadableDeltaError(self._delta.delta, error) from error
            count = min(len(row) - at, len(self._rest))
            row[at : at + count] = self._rest[:count]
            self._rest = self._rest[count:]
            at += count


async def _decoded(
    log: RunLog, layout: FragmentLayout, delta: AcceptedItem, workers: Workers
) -> AsyncGenerator[Values, None]:
    for part in delta.parts:
        kept = log.blobs.kept_frames(part)
        for frame in kept:
            yield await workers.run(decode_frame, frame, layout)
        if not kept:
            async for batch in frame_batches(log.blobs.part_frames(part, at_once_bytes=0), part.first, part.numel):
                for frame in parse_frames(batch.data):
                    yield await workers.run(decode_frame, frame, layout)
