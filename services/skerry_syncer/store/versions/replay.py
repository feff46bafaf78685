"""Rebuilds any version of a fragment from the log and its objects, bit for bit.

There are two ways. The outer state (weights, momentum, residual) comes from the nearest snapshot and the rounds after
it, which are replayed from their deltas and the scalars that their commits name. The weights alone also come from a
snapshot and the updates after it; this takes less work, and works when the deltas were collected. Either result must
have the digest that the log names. The arithmetic is in `skerry.algorithm.step`; its scalars are float32 numbers there
and the bits of these, in hex, in the log.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import ArrayLike

from skerry.algorithm.step import (
    TORN,
    AdvancedSpan,
    Float32s,
    OuterState,
    Scalars,
    Span,
    Step,
    accumulate,
    advance_span,
    step_spans,
    subtract_update,
)
from skerry.runtime.logs import get_logger
from skerry.runtime.workers import Workers, run_jobs
from skerry.wire.digests import LEAF_NUMEL, tree_leaves, tree_root
from skerry.wire.errors import FrameError, NonFiniteError, TensorFileError
from skerry.wire.frames import Frame, parse_frames
from skerry.wire.safetensors import TensorFileReader
from skerry_syncer.store.errors import CollectedError, ObjectMissingError, StoreError, UnreadableObjectError
from skerry_syncer.store.log.entries import AcceptedItem, MergeScalars, ObjectRef
from skerry_syncer.store.log.state import CommitRecord, VersionState
from skerry_syncer.store.versions.blobs import frame_batches
from skerry_syncer.store.versions.run import Run
from skerry_syncer.store.versions.scratch import Scratch

# A full frame has 2^18 elements, and takes half a millisecond. With 4 a job a synchronisation took 57 ms
# more of 2,500 ms of CPU, with a standard error of 40.
_FRAMES_A_JOB: Final = 16
_LOG: Final = get_logger(__name__)


class UnreadableDeltaError(StoreError):
    """An accepted delta can't be read back: its round is closed again without it. `delta` names it."""

    reason = "INCOMPLETE"

    def __init__(self, delta: str, cause: Exception) -> None:
        super().__init__(f"delta can't be read. delta={delta}, cause={cause}")
        self.delta = delta


# Raised for objects that are missing or damaged. An unreachable store raises another error.
DAMAGE: Final = (FrameError, NonFiniteError, ObjectMissingError, UnreadableDeltaError, UnreadableObjectError)


class Replayer:
    """Reads and rebuilds the versions of one fragment of a run. It keeps nothing between calls.

    Every method raises ObjectMissingError where a version never was, or what it takes was collected. A collection may
    take objects while they are read: then another way to the version is looked for.
    """

    def __init__(self, run: Run, fragment: str) -> None:
        self._run = run
        self._layout = run.spec.fragment(fragment)
        self._fragment = run.state.fragments[fragment]

    async def rebuild(self, version: int, scratch: Scratch) -> OuterState:
        """Returns the outer state of any version whose deltas are retained, abandoned ones too.

        If a snapshot can't be read, or does not lead to the digest that the log names, an older one is taken.

        Raises:
            UnreadableDeltaError: a delta that went into it can't be read.
            UnreadableObjectError: no snapshot that is left leads to it.
        """
        weights, momentum, residual = scratch.zeros(3, self._layout.numel)
        state = OuterState(weights, momentum, residual, TORN)
        while True:
            base = self.base(version, with_outer=True)
            try:
                await self.load_snapshot(base, state)
                await self.advance(state, version, scratch)
            except CollectedError:
                continue
            except UnreadableObjectError as error:
                self._run.blobs.unreadable.update(ref.name for ref in (*base.weights, *base.outer))
                _LOG.warning("snapshot can't be used, looking for an older one", cause=str(error))
            else:
                return state

    async def advance(self, state: OuterState, version: int, scratch: Scratch) -> None:
        """Takes `state`, in place, to a later version by replaying every round between; the same version is no work.

        Raises:
            ValueError: `state` is torn, or later than `version`.
            UnreadableDeltaError: as `rebuild`; `state` is then of the last version that was reached, or torn.
            UnreadableObjectError: a result does not have the digest that the log names; `state` is then torn.
        """
        if not 0 <= state.version <= version:
            raise ValueError(f"state can't advance. state_version={state.version}, version={version}")
        if state.version == version:
            return
        with scratch.lent(self._layout.numel) as acc:
            while state.version < version:
                following = self._version(state.version + 1)
                if following.commit is None:
                    await self.load_snapshot(following, state)
                else:
                    await self.replay(following.commit, state, acc)

    async def replay(
        self,
        record: CommitRecord,
        state: OuterState,  # of the version before; written
        acc: Float32s,  # (numel,) overwritten
    ) -> None:
        """Takes `state` to the version that `record` made, from its deltas.

        Raises:
            ObjectMissingError: the deltas were collected; `state` is untouched.
            CollectedError: a collection took them meanwhile; likewise.
            UnreadableDeltaError: a delta can't be read; `state` is untouched.
            NonFiniteError: the recorded scalars lead out of the codec's range; `state` is torn.
            UnreadableObjectError: the result does not have the digest that the log names; `state` is torn.
        """
        scalars = scalars_from_record(record.commit.scalars)
        if record.commit.version < self._fragment.oldest:
            raise CollectedError(f"deltas are forgotten. {self._where(record.commit.version)}")
        deltas = [self._run.state.deltas[member.delta].item for member in record.close.members]
        if self._run.state.are_condemned(part for delta in deltas for part in delta.parts):
            raise ObjectMissingError(f"deltas were collected. {self._where(record.commit.version)}")
        name = self._layout.name
        await accumulate_deltas(self._run, name, deltas, scalars.coefficients, acc)
        step = Step(self._layout, scalars, record.commit.encoding, state, acc)
        job = partial(advance_span, step, packs=False)
        _, digest = await take_step(step, record.commit.version, job, workers=self._run.workers)
        if digest != record.commit.digest:
            state.version = TORN
            raise self._differs("replay made other weights", record.commit.version, digest)

    async def weights_at(self, version: int) -> Float32s:
        """Returns the weights of any version, abandoned ones too, from the nearest snapshot and the updates after it.

        If a snapshot can't be read, an older one is taken.

        Raises:
            UnreadableObjectError: an update can't be read, or no snapshot that is left leads to the version.
        """
        weights = np.empty(self._layout.numel, np.float32)
        while True:
            base = self.base(version, with_outer=False)
            try:
                await self.read_vector(base.weights, weights)
            except (CollectedError, UnreadableObjectError) as error:
                _LOG.warning("snapshot can't be used, looking for another", cause=str(error))
                continue
            with suppress(CollectedError):
                await self._follow(base, version, weights)
                return weights

    async def _follow(self, base: VersionState, version: int, weights: Float32s) -> None:
        """Takes `weights`, in place, from those of `base` to those of `version` by the updates between."""
        for following in range(base.version + 1, version + 1):
            record = self._version(following).commit
            assert record is not None  # a version without a commit has a snapshot, and would be the base
            if self._run.state.are_condemned(record.commit.update):
                raise ObjectMissingError(f"update was collected. {self._where(following)}")
            await self.apply_update(record.commit.update, weights)
        await self.check_digest(self._version(version), weights, f"weights after snapshot {base.version} differ")

    async def apply_update(self, update: Sequence[ObjectRef], weights: Float32s) -> None:
        """Takes `weights` (numel,), in place, from one version to the next; checks frames, not the digest.

        Raises:
            UnreadableObjectError: the update is not one of this fragment, or damaged; `weights` are then of no use.
        """

        async def jobs(ref: ObjectRef) -> AsyncIterator[Callable[[], None]]:
            async for batch in frame_batches(self._run.blobs.read_checked(ref), ref.first, ref.numel):
                yield partial(subtract_update, weights, batch.data, self._layout)

        for ref in update:
            try:
                await run_jobs(self._run.workers, jobs(ref))
            except FrameError as error:
                raise UnreadableObjectError(ref.name, error) from error

    async def load_snapshot(self, source: VersionState, state: OuterState) -> None:
        """Fills `state` from a version's own snapshot; absent momentum and residual are zero.

        Raises:
            ObjectMissingError: the version has no snapshot, or it was collected; `state` is then torn.
            UnreadableObjectError: it can't be read, or its weights don't have the digest that the log names; likewise.
        """
        state.version = TORN
        if not source.weights:
            raise ObjectMissingError(f"version has no snapshot. {self._where(source.version)}")
        await self.read_vector(source.weights, state.weights)
        await self.check_digest(source, state.weights, "snapshot differs")
        momentum, residual = outer_refs(source)
        await self.read_vector(momentum, state.momentum)
        await self.read_vector(residual, state.residual)
        state.version = source.version

    async def check_digest(self, version: VersionState, weights: Float32s, problem: str) -> None:
        """Returns if `weights` (numel,) have the digest that the log names.

        Raises:
            UnreadableObjectError: they have not; its message begins with `problem`.
        """
        digest = await weights_digest(weights, workers=self._run.workers)
        if digest != version.digest:
            raise self._differs(problem, version.version, digest)

    async def read_vector(self, refs: Sequence[ObjectRef], out: Float32s) -> None:
        """Fills `out` (numel,) from the objects of a snapshot, or with zeros if there are none.

        Raises:
            UnreadableObjectError: an object can't be read, or does not fit the fragment.
        """
        if not refs:
            # Touching gigabytes for the first time takes too long for the loop.
            await self._run.workers.run(out.fill, 0)
        for ref in refs:
            reader = TensorFileReader(self._layout, out, first=ref.first, numel=ref.numel)
            try:
                async for piece in self._run.blobs.read_checked(ref):
                    reader.feed(piece)
                reader.finish()
            except TensorFileError as error:
                self._run.blobs.unreadable.add(ref.name)
                raise UnreadableObjectError(ref.name, error) from error

    def _version(self, version: int) -> VersionState:
        try:
            return self._fragment.versions[version]
        except KeyError:
            raise ObjectMissingError(f"no such version. {self._where(version)}") from None

    def base(self, version: int, *, with_outer: bool) -> VersionState:
        """Returns the nearest version at or below `version` that has a snapshot which can be read.

        Raises:
            ObjectMissingError: all of them were collected.
            UnreadableObjectError: there is none that can be read. The next call tries all of them again.
        """
        self._version(version)
        versions, unreadable = self._fragment.versions, self._run.blobs.unreadable
        skipped: set[str] = set()
        number = version
        lowest = self._fragment.oldest if with_outer else 0  # of those below it only the weights are known
        while number in versions and number >= lowest:
            candidate = versions[number]
            refs = (*candidate.weights, *(candidate.outer if with_outer else ()))
            if candidate.weights and not self._run.state.are_condemned(refs):
                damaged = unreadable.intersection(ref.name for ref in refs)
                if not damaged:
                    return candidate
                skipped |= damaged
            number -= 1
        if not skipped:
            raise ObjectMissingError(f"what leads to the version was collected. {self._where(version)}")
        unreadable -= skipped
        raise UnreadableObjectError(min(skipped), f"no other snapshot leads there. {self._where(version)}")

    def _where(self, version: int) -> str:
        return f"fragment={self._layout.name}, version={version}"

    def _differs(self, problem: str, version: int, digest: str) -> UnreadableObjectError:
        cause = f"{problem} from the log. expected={self._version(version).digest}, actual={digest}"
        return UnreadableObjectError(f"{self._layout.name} version {version}", cause)


async def accumulate_deltas(
    run: Run,
    fragment: str,
    deltas: Sequence[AcceptedItem],  # in member order
    coefficients: Float32s,  # (members, tensors)
    acc: Float32s,  # (numel,) overwritten
) -> None:
    """Writes the weighted sum of the deltas: of frames in memory, or read from the store in bounded pieces.

    Raises:
        UnreadableDeltaError: a delta can't be read back; `acc` is then of no use.
        CollectedError: a collection took one meanwhile; likewise.
        StoreUnavailableError: the store can't say; the same call may succeed later.
    """
    layout = run.spec.fragment(fragment)

    async def jobs(member: int, delta: AcceptedItem) -> AsyncIterator[Callable[[], None]]:
        for part in delta.parts:
            in_memory = run.blobs.recent_parts.take(part.name)
            for start in range(0, len(in_memory), _FRAMES_A_JOB):
                frames: Iterable[Frame] = in_memory[start : start + _FRAMES_A_JOB]
                yield partial(accumulate, acc, frames, layout, coefficients[member], is_first=member == 0)
            if not in_memory:
                async for batch in frame_batches(run.blobs.part_frames(part), part.first, part.numel):
                    frames = parse_frames(batch.data)  # parsed by the job that goes over them
                    yield partial(accumulate, acc, frames, layout, coefficients[member], is_first=member == 0)

    for member, delta in enumerate(deltas):
        try:
            await run_jobs(run.workers, jobs(member, delta))
        except CollectedError:  # with its round: no reason to decide anything about the delta
            raise
        except (FrameError, ObjectMissingError, UnreadableObjectError) as error:
            raise UnreadableDeltaError(delta.delta, error) from error


async def take_step(
    step: Step, version: int, job: Callable[[Span], AdvancedSpan], *, workers: Workers
) -> tuple[list[AdvancedSpan], str]:
    """Takes the state of `step` to `version` by `job`, span by span; returns its results and the weights' digest.

    Raises:
        NonFiniteError: the step left the range of the codec; the state is then torn.
    """
    step.state.version = TORN

    async def jobs() -> AsyncIterator[Callable[[], AdvancedSpan]]:
        for span in step_spans(step.layout, step.encoding):
            yield partial(job, span)

    advanced = await run_jobs(workers, jobs())
    digest = await weights_digest(step.state.weights, workers=workers)
    step.state.version = version
    return advanced, digest


def outer_refs(version: VersionState) -> tuple[list[ObjectRef], list[ObjectRef]]:
    """Returns the references to momentum and to residual; the name of each object has its kind."""
    momentum = [ref for ref in version.outer if "-momentum-" in ref.name]
    residual = [ref for ref in version.outer if ref not in momentum]
    return momentum, residual


async def weights_digest(weights: Float32s, *, workers: Workers) -> str:
    """Returns the tree digest in hex, its leaves hashed on worker threads."""

    async def jobs() -> AsyncIterator[Callable[[], list[bytes]]]:
        for first in range(0, len(weights), LEAF_NUMEL):
            yield partial(list, tree_leaves(weights[first : first + LEAF_NUMEL]))

    leaves = [leaf for (leaf,) in await run_jobs(workers, jobs())]
    return tree_root(len(weights), leaves).hex()


def scalars_from_record(record: MergeScalars) -> Scalars:
    """Returns the numbers that a commit names, exactly."""
    rate, momentum, decay, gain = float32s_from_hex([record.rate, record.momentum, record.decay, record.gain])
    coefficients = np.array([float32s_from_hex(row) for row in record.coefficients], np.float32)
    return Scalars(rate, momentum, float32s_from_hex(record.tensor_scales), coefficients, decay, gain)


def scalars_to_record(scalars: Scalars) -> MergeScalars:
    """Returns what a commit names."""
    rate, momentum, decay, gain = float32s_to_hex([scalars.rate, scalars.momentum, scalars.decay, scalars.gain])
    coefficients = tuple(map(float32s_to_hex, scalars.coefficients))
    return MergeScalars(rate, momentum, float32s_to_hex(scalars.tensor_scales), coefficients, decay, gain)


def float32s_to_hex(values: ArrayLike) -> tuple[str, ...]:
    """Returns the bits of each float32, 8 hex digits, most significant first."""
    return tuple(np.asarray(values, ">f4").tobytes().hex(" ", 4).split())


def float32s_from_hex(digits: Sequence[str]) -> Float32s:
    """Returns the float32 numbers with these bits, exactly."""
    return np.frombuffer(bytes.fromhex("".join(digits)), ">f4").astype(np.float32)
