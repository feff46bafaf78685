"""Makes the first version of a fragment, from the initial weights that the run's creator has pushed."""

from __future__ import annotations

from functools import partial
from typing import Final

from skerry.runtime.logs import get_logger
from skerry.runtime.workers import Workers
from skerry.wire.errors import FrameError
from skerry.wire.frames import decode_frames
from skerry_syncer.store.errors import UnreadableObjectError
from skerry_syncer.store.log.entries import INITIAL_BASE, SnapshotItem
from skerry_syncer.store.versions.blobs import frame_batches
from skerry_syncer.store.versions.replay import snapshot_tensors, weights_digest
from skerry_syncer.store.versions.run import Run
from skerry_syncer.store.versions.scratch import Scratch

_LOG: Final = get_logger(__name__)


async def seed(run: Run, name: str, workers: Workers, scratch: Scratch) -> None:
    """Makes version 0 of the fragment called `name` from its first accepted push of initial weights, if there is one.

    Idempotent: a second snapshot of version 0, by any replica, has no effect.

    Raises:
        StoreError: the store failed; the fragment has no version yet.
        UnreadableObjectError: the stored push is not what was accepted.
    """
    fragment = run.state.fragments[name]
    if fragment.version != INITIAL_BASE or not fragment.pending:
        return
    source = next(iter(fragment.pending.values())).item
    layout = fragment.layout
    (weights,) = scratch.zeros(1, layout.numel)
    try:
        for part in source.parts:
            pieces = run.blobs.part_frames(part)
            async for batch in frame_batches(pieces, part.first, part.numel):
                out = weights[batch.first : batch.first + batch.numel]
                await workers.run(partial(decode_frames, batch.data, layout, out, first=batch.first))
    except FrameError as error:
        raise UnreadableObjectError(source.parts[0].name, f"initial weights. fragment={name}, {error}") from error
    digest = await weights_digest(weights, workers=workers)
    ref = await run.blobs.write_snapshot(name, 0, "weights", snapshot_tensors(layout, weights))
    await run.log.append([SnapshotItem(name, 0, digest, (ref,), ())])
    _LOG.info("initial weights stored", run=run.spec.name, fragment=name, numel=layout.numel)
