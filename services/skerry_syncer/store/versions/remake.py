"""Makes the bytes of a lost snapshot or update again, from an older snapshot and the rounds after it.

The arithmetic is exact, so the same bytes come out as were lost, unless another version of the compression library
wrote them. The caller compares their digest with the log's before it stores them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from functools import partial

from skerry.algorithm.step import AdvancedSpan, Step, advance_span, step_spans
from skerry.runtime.workers import Workers, run_jobs
from skerry_syncer.store.errors import ObjectMissingError
from skerry_syncer.store.log.entries import ObjectRef
from skerry_syncer.store.log.run_log import RunLog
from skerry_syncer.store.log.state import VersionState
from skerry_syncer.store.versions.blobs import SnapshotKind, snapshot_pieces
from skerry_syncer.store.versions.replay import Replayer, accumulate_deltas, scalars_from_record, snapshot_tensors
from skerry_syncer.store.versions.scratch import Scratch

Pieces = Callable[[], AsyncIterator[bytes]]


class Remaker:
    """Makes objects of one fragment again. Every method raises one of `replay.DAMAGE` where that can't be done."""

    def __init__(self, log: RunLog, fragment: str, workers: Workers, scratch: Scratch) -> None:
        """Takes what the objects are read and made with."""
        self._log = log
        self._layout = log.spec.fragment(fragment)
        self._workers = workers
        self._scratch = scratch
        self._replayer = Replayer(log, fragment, workers)

    async def snapshot(self, at: VersionState, ref: ObjectRef, kind: SnapshotKind) -> Pieces:
        """Returns the bytes of one object of a version's snapshot."""
        layout = self._layout
        if (ref.first, ref.numel) != (0, layout.numel):
            raise ObjectMissingError(f"only snapshots of one object a kind can be made again. name={ref.name}")
        if kind == "weights":
            values = await self._replayer.weights_at(at.version)
        else:
            state = await self._replayer.rebuild(at.version, self._scratch)
            values = state.momentum if kind == "momentum" else state.residual
        return lambda: snapshot_pieces(layout.name, at.version, kind, snapshot_tensors(layout, values))

    async def update(self, at: VersionState, ref: ObjectRef) -> Pieces:
        """Returns the bytes of one object of the update that made a version; they are held in memory."""
        record, layout = at.commit, self._layout
        if record is None:
            raise ObjectMissingError(f"a snapshot made the version, and no update. version={at.version}")
        scalars = scalars_from_record(record.commit.scalars)
        deltas = [self._log.state.deltas[member.delta].item for member in record.close.members]
        state = await self._replayer.rebuild(at.version - 1, self._scratch)
        (acc,) = self._scratch.zeros(1, layout.numel)
        await accumulate_deltas(self._log, layout.name, deltas, scalars.coefficients, acc, workers=self._workers)
        step = Step(layout, scalars, record.commit.encoding, state, acc)

        async def jobs() -> AsyncIterator[Callable[[], AdvancedSpan]]:
            for span in step_spans(layout, step.encoding):
                if ref.first <= span.first < ref.first + ref.numel:
                    yield partial(advance_span, step, span)

        spans = await run_jobs(self._workers, jobs())

        async def pieces() -> AsyncIterator[bytes]:
            for span in spans:
                for frame in span.frames:
                    yield frame

        return pieces
