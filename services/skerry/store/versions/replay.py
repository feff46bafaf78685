"""Rebuilds any version of a fragment from the log and its objects, bit for bit.

The outer state (weights, momentum, residual) of a version is that of the nearest snapshot and the replay of the rounds
after it, each from its deltas and from the scalars that its commit names. The weights alone also follow from a
snapshot and the updates after it, which is cheaper and outlives the deltas. Either way the result must have the digest
that the log names. The arithmetic is in `skerry.algorithm.step`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from skerry.algorithm.step import (
    TORN,
    Float32s,
    OuterState,
    ReplayedSpan,
    Step,
    accumulate,
    digest_of_spans,
    replay_span,
    step_spans,
    subtract_update,
)
from skerry.runtime.parallel import run_jobs
from skerry.runtime.workers import Workers
from skerry.store.errors import LogCorruptError, ObjectMissingError, StoreError
from skerry.store.log.entries import AcceptedItem, ObjectRef
from skerry.store.log.run_log import RunLog
from skerry.store.log.state import CommitRecord, VersionState
from skerry.store.versions.frame_stream import frame_batches
from skerry.store.versions.scalars import scalars_from_record
from skerry.store.versions.scratch import Scratch
from skerry.wire.digests import LEAF_NUMEL, tree_leaves, tree_root
from skerry.wire.errors import FrameError, TensorFileError
from skerry.wire.frame_reader import FrameBatch
from skerry.wire.frames import decode_frames
from skerry.wire.layout import FragmentLayout
from skerry.wire.safetensors import TensorFileReader

__all__ = [
    "OuterState",
    "Replayed",
    "UnreadableDeltaError",
    "accumulate_deltas",
    "advance",
    "apply_update",
    "load_snapshot",
    "outer_refs",
    "read_update",
    "read_vector",
    "rebuild",
    "replay_version",
    "snapshot_tensors",
    "weights_at",
    "weights_digest",
]


class UnreadableDeltaError(StoreError):
    """An accepted delta can't be read back: its round is closed again without it. `delta` names it."""

    reason = "INCOMPLETE"

    def __init__(self, delta: str, cause: Exception) -> None:
        super().__init__(f"delta can't be read. delta={delta}, cause={cause}")
        self.delta = delta


class Replayed(NamedTuple):
    """What the replay of one version came to; nothing in it has been compared with the log yet."""

    digest: str  # tree digest of the new weights, hex
    first_difference: int | None  # the first element whose update is not the published one, where that was given


@dataclass(frozen=True)
class _Reader:
    """One fragment of one run, and what it takes to read it."""

    log: RunLog
    layout: FragmentLayout
    workers: Workers

    def version(self, version: int) -> VersionState:
        try:
            return self.log.state.fragments[self.layout.name].versions[version]
        except KeyError:
            raise ObjectMissingError(f"no such version. fragment={self.layout.name}, version={version}") from None

    def has_all(self, refs: Sequence[ObjectRef]) -> bool:
        return all(ref.name not in self.log.state.condemned for ref in refs)

    def base(self, version: int, *, with_outer: bool) -> VersionState:
        """Returns the nearest version at or below `version` that has a snapshot."""
        at = self.version(version)
        while not (at.weights and self.has_all(at.weights) and (not with_outer or self.has_all(at.outer))):
            at = self.version(at.version - 1)
        return at


def _reader(log: RunLog, fragment: str, workers: Workers) -> _Reader:
    return _Reader(log, log.spec.fragment(fragment), workers)


async def rebuild(log: RunLog, fragment: str, version: int, *, scratch: Scratch, workers: Workers) -> OuterState:
    """Returns the outer state of any version whose deltas are retained, abandoned ones too.

    Raises:
        ObjectMissingError: the version never was, or what it takes was collected.
        UnreadableDeltaError: a delta that went into it can't be read.
        LogCorruptError: the result does not have the digest that the log names.
    """
    reader = _reader(log, fragment, workers)
    base = reader.base(version, with_outer=True)
    weights, momentum, residual = scratch.zeros(3, reader.layout.numel)
    state = OuterState(weights, momentum, residual, TORN)
    await load_snapshot(log, fragment, base.version, state, workers=workers)
    await advance(log, fragment, state, version, scratch=scratch, workers=workers)
    return state


async def advance(
    log: RunLog, fragment: str, state: OuterState, version: int, *, scratch: Scratch, workers: Workers
) -> None:
    """Takes `state`, in place, to a later version by replaying every round between; the same version is no work.

    Raises:
        ValueError: `state` is torn, or later than `version`.
        ObjectMissingError, UnreadableDeltaError, LogCorruptError: as `rebuild`; `state` then stands on the last version
            that was reached, or is torn.
    """
    if not 0 <= state.version <= version:
        raise ValueError(f"state can't advance. state_version={state.version}, version={version}")
    if state.version == version:
        return
    reader = _reader(log, fragment, workers)
    (acc,) = scratch.zeros(1, reader.layout.numel)
    while state.version < version:
        following = reader.version(state.version + 1)
        if following.commit is None:
            await load_snapshot(log, fragment, following.version, state, workers=workers)
            continue
        replayed = await replay_version(log, fragment, following.commit, state, acc, workers=workers)
        if replayed.digest != following.digest:
            state.version = TORN
            raise LogCorruptError(
                f"replay differs from the log. fragment={fragment}, version={following.version}, "
                f"expected={following.digest}, actual={replayed.digest}"
            )


async def replay_version(
    log: RunLog,
    fragment: str,
    record: CommitRecord,
    state: OuterState,  # of the version before; written
    acc: Float32s,  # (numel,) overwritten
    *,
    workers: Workers,
    published: Float32s | None = None,  # (numel,) the stored update as decoded, to compare with
) -> Replayed:
    """Takes `state` to the version that `record` made, from its deltas; compares nothing with the log.

    Raises:
        ObjectMissingError: the deltas were collected; `state` is untouched.
        UnreadableDeltaError: a delta can't be read; `state` is untouched.
        NonFiniteError: the recorded scalars lead out of the codec's range; `state` is torn.
    """
    reader = _reader(log, fragment, workers)
    scalars = scalars_from_record(record.commit.scalars)
    deltas = [log.state.deltas[member.delta].item for member in record.close.members]
    if not reader.has_all([part for delta in deltas for part in delta.parts]):
        raise ObjectMissingError(f"deltas were collected. fragment={fragment}, version={record.commit.version}")
    await accumulate_deltas(log, fragment, deltas, scalars.coefficients, acc, workers=workers)
    state.version = TORN

    step = Step(reader.layout, scalars, record.commit.encoding, state, acc)

    async def jobs() -> AsyncIterator[Callable[[], ReplayedSpan]]:
        for span in step_spans(step.layout, step.encoding):
            yield partial(replay_span, step, span, published=published)

    spans = await run_jobs(workers, jobs())
    digest = digest_of_spans(reader.layout.numel, [span.pieces for span in spans]).hex()
    state.version = record.commit.version
    differences = (span.first_difference for span in spans if span.first_difference is not None)
    return Replayed(digest, next(differences, None))


async def accumulate_deltas(
    log: RunLog,
    fragment: str,
    deltas: Sequence[AcceptedItem],  # in member order
    coefficients: Float32s,  # (members, tensors)
    acc: Float32s,  # (numel,) overwritten
    *,
    workers: Workers,
) -> None:
    """Writes the weighted sum of the deltas, reading them from the store in bounded pieces.

    Raises:
        UnreadableDeltaError: a delta can't be read back; `acc` is then of no use.
        StoreUnavailableError: the store can't say; the same call may succeed later.
    """
    reader = _reader(log, fragment, workers)
    for member, delta in enumerate(deltas):
        jobs = _accumulate_jobs(reader, delta, coefficients[member], acc, is_first=member == 0)
        try:
            await run_jobs(workers, jobs)
        except (FrameError, ObjectMissingError, LogCorruptError) as error:
            raise UnreadableDeltaError(delta.delta, error) from error


async def _accumulate_jobs(
    reader: _Reader, delta: AcceptedItem, coefficients: Float32s, acc: Float32s, *, is_first: bool
) -> AsyncIterator[Callable[[], None]]:
    for part in delta.parts:
        async for batch in frame_batches(reader.log.blobs.part_frames(part), part.first, part.numel):
            yield partial(accumulate, acc, batch.data, reader.layout, coefficients, is_first=is_first)


async def weights_at(log: RunLog, fragment: str, version: int, *, workers: Workers) -> Float32s:
    """Returns the weights of any version, abandoned ones too, from the nearest snapshot and the updates after it.

    Raises:
        ObjectMissingError: the version never was, or what it takes was collected.
        LogCorruptError: the result does not have the digest that the log names.
    """
    reader = _reader(log, fragment, workers)
    base = reader.base(version, with_outer=False)
    weights = np.empty(reader.layout.numel, np.float32)
    await read_vector(log, fragment, base.weights, weights)
    for following in range(base.version + 1, version + 1):
        record = reader.version(following).commit
        assert record is not None  # a version without a commit has a snapshot, and would be the base
        await apply_update(log, fragment, record.commit.update, weights, workers=workers)
    expected, actual = reader.version(version).digest, await weights_digest(weights, workers=workers)
    if actual != expected:
        raise LogCorruptError(
            f"weights differ from the log. fragment={fragment}, version={version}, snapshot={base.version}, "
            f"expected={expected}, actual={actual}"
        )
    return weights


async def apply_update(
    log: RunLog,
    fragment: str,
    update: Sequence[ObjectRef],
    weights: Float32s,  # (numel,) written
    *,
    workers: Workers,
) -> None:
    """Takes `weights`, in place, from one version to the next by its stored update; checks frames, not the digest.

    Raises:
        ObjectMissingError: the update was collected or lost; `weights` are then of no use.
        LogCorruptError: the update is not what an update of this fragment can be; `weights` are then of no use.
    """
    await _each_batch(log, fragment, update, partial(_subtract_batch, weights), workers)


async def read_update(
    log: RunLog,
    fragment: str,
    update: Sequence[ObjectRef],
    out: Float32s,  # (numel,) written
    *,
    workers: Workers,
) -> None:
    """Writes a stored update as every learner decodes it.

    Raises:
        ObjectMissingError, LogCorruptError: as `apply_update`.
    """
    await _each_batch(log, fragment, update, partial(_decode_batch, out), workers)


async def _each_batch(
    log: RunLog,
    fragment: str,
    update: Sequence[ObjectRef],
    job: Callable[[FragmentLayout, FrameBatch], None],
    workers: Workers,
) -> None:
    layout = log.spec.fragment(fragment)

    async def jobs() -> AsyncIterator[Callable[[], None]]:
        for ref in update:
            async for batch in frame_batches(log.blobs.read(ref), ref.first, ref.numel):
                yield partial(job, layout, batch)

    try:
        await run_jobs(workers, jobs())
    except FrameError as error:
        raise LogCorruptError(f"update can't be read. fragment={fragment}, cause={error}") from error


def _subtract_batch(weights: Float32s, layout: FragmentLayout, batch: FrameBatch) -> None:
    subtract_update(weights, batch.data, layout)


def _decode_batch(out: Float32s, layout: FragmentLayout, batch: FrameBatch) -> None:
    decode_frames(batch.data, layout, out[batch.first : batch.first + batch.numel], first=batch.first)


async def load_snapshot(
    log: RunLog,
    fragment: str,
    version: int,
    state: OuterState,  # written
    *,
    workers: Workers,
) -> None:
    """Fills `state` from a version's own snapshot; absent momentum and residual are zero.

    Raises:
        ObjectMissingError: the version has no snapshot, or it was collected; `state` is then torn.
        LogCorruptError: it can't be read, or its weights don't have the digest that the log names.
    """
    reader = _reader(log, fragment, workers)
    at = reader.version(version)
    state.version = TORN
    if not at.weights:
        raise ObjectMissingError(f"version has no snapshot. fragment={fragment}, version={version}")
    await read_vector(log, fragment, at.weights, state.weights)
    digest = await weights_digest(state.weights, workers=workers)
    if digest != at.digest:
        raise LogCorruptError(
            f"snapshot differs from the log. fragment={fragment}, version={version}, "
            f"expected={at.digest}, actual={digest}"
        )
    momentum, residual = outer_refs(at)
    for refs, vector in ((momentum, state.momentum), (residual, state.residual)):
        if refs:
            await read_vector(log, fragment, refs, vector)
        else:
            await workers.run(vector.fill, 0)  # gigabytes of first touches: not on the loop
    state.version = version


def outer_refs(version: VersionState) -> tuple[list[ObjectRef], list[ObjectRef]]:
    """Returns the references to momentum and to residual; their kind stands in their objects' names."""
    momentum = [ref for ref in version.outer if "-momentum-" in ref.name]
    residual = [ref for ref in version.outer if ref not in momentum]
    return momentum, residual


async def read_vector(log: RunLog, fragment: str, refs: Sequence[ObjectRef], out: Float32s) -> None:
    """Fills `out`, (numel,), from the objects of a snapshot; without any it is zero.

    Raises:
        ObjectMissingError: one was collected or lost.
        LogCorruptError: one does not fit the fragment.
    """
    if not refs:
        out[:] = 0
    for ref in refs:
        reader = TensorFileReader(log.spec.fragment(fragment), out, first=ref.first, numel=ref.numel)
        try:
            async for piece in log.blobs.read(ref):
                reader.feed(piece)
            reader.finish()
        except TensorFileError as error:
            raise LogCorruptError(f"snapshot can't be read. name={ref.name}, cause={error}") from error


async def weights_digest(weights: Float32s, *, workers: Workers) -> str:
    """Returns the tree digest in hex, its leaves hashed on worker threads."""

    async def jobs() -> AsyncIterator[Callable[[], bytes]]:
        for first in range(0, len(weights), LEAF_NUMEL):
            yield partial(_leaf, weights[first : first + LEAF_NUMEL])

    return tree_root(len(weights), await run_jobs(workers, jobs())).hex()


def _leaf(values: Float32s) -> bytes:
    (leaf,) = tree_leaves(values)
    return leaf


def snapshot_tensors(layout: FragmentLayout, values: Float32s) -> dict[str, Float32s]:
    """Returns views of a flat vector by tensor name: what a snapshot of it holds."""
    return {
        spec.name: values[offset : offset + spec.numel].reshape(spec.shape)
        for spec, offset in zip(layout.tensors, layout.offsets, strict=True)
    }
