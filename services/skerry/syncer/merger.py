"""Turns frozen sets of deltas into versions: merges, commits and snapshots.

    merge_round        scalars from the recorded norms, the deltas' weighted sum, the quantised update, made durable
      -> MergeResult   the commit, which `Merger` appends
      -> adopt()       once the log has the commit, takes the outer state to the new version in place

Until `adopt` the outer state is untouched, so a merge that fails, or that another replica won, costs nothing but its
own work. At most the state (3 arrays), the sum (1) and the encoded update are held, however many learners there are;
and the state before (3), if a snapshot of it is still being written.
The arithmetic is in `skerry.algorithm` and runs on worker threads.

The outer state of each fragment (weights, momentum, residual) is cached in scratch between merges. The cache is used
only if its version and digest are in the log; otherwise the state is rebuilt from a snapshot and the deltas after it.
"""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from operator import xor
from typing import Final

import numpy as np
from msgspec import structs

from skerry.algorithm.median import median_shares
from skerry.algorithm.merge import Round
from skerry.algorithm.outer import OuterStep, learning_rate_at, momentum_at, outer_step
from skerry.algorithm.step import (
    TORN,
    Float32s,
    OuterState,
    PreparedSpan,
    Scalars,
    Step,
    adopt_span,
    digest_of_spans,
    prepare_span,
    step_spans,
)
from skerry.runtime.clock import Clock
from skerry.runtime.logs import get_logger
from skerry.runtime.workers import BEHALF, IN_FLIGHT, Workers, in_order, run_jobs
from skerry.store.errors import StoreUnavailableError, UnreadableObjectError
from skerry.store.log.entries import (
    INITIAL_BASE,
    AcceptedItem,
    ClosedItem,
    CommittedItem,
    ObjectRef,
    SnapshotItem,
)
from skerry.store.log.run_log import RunLog
from skerry.store.log.state import RunState
from skerry.store.versions.blobs import SnapshotKind, frame_batches
from skerry.store.versions.replay import (
    UnreadableDeltaError,
    accumulate_deltas,
    scalars_to_record,
    snapshot_tensors,
    weights_digest,
)
from skerry.store.versions.scratch import Scratch
from skerry.syncer.closing import references
from skerry.syncer.inner_products import inner_products
from skerry.syncer.outer_states import OuterStates
from skerry.syncer.restart import restart
from skerry.syncer.rounds import MergeKey, most_members
from skerry.wire.errors import FrameError, NonFiniteError
from skerry.wire.frames import Frame, decode_frames
from skerry.wire.policy import MergeRule, Policy
from skerry.wire.quantise import per_tensor_squared_norms

# Spans, of 2^20 elements, in one object of an update. Of several objects each rank of an island fetches its own.
UPDATE_OBJECT_SPANS: Final = 8


class DamagedStateError(UnreadableObjectError):
    """The state that a merge began from does not have the bits that were written: the scratch storage failed."""

    def __init__(self, fragment: str) -> None:
        """Names the fragment."""
        super().__init__(f"scratch of {fragment}", "it has other bytes than were written")


@dataclass
class MergeResult:
    """A version that is durable but not committed: what its commit names, and what adopting it takes."""

    commit: CommittedItem  # for the caller to append
    _step: Step = field(repr=False)
    _decompressed: list[tuple[Frame, ...]] = field(repr=False)  # the update's, of each span

    def is_same_version_as(self, other: CommittedItem) -> bool:
        """Whether `other`, maybe another replica's, names this arithmetic: only then may this merge be adopted."""
        return structs.replace(other, update=()) == structs.replace(self.commit, update=())

    async def adopt(self, state: OuterState, *, workers: Workers) -> None:
        """Takes the outer state that the merge began from, or a copy of it, to the new version. To be called once.

        No other task may read or write `state` meanwhile. If it fails, or is cancelled, the state is torn and has to be
        rebuilt (`skerry.store.versions.replay.Replayer`).
        """
        step = replace(self._step, state=state)
        state.version, state.checksum = TORN, None

        async def jobs() -> AsyncIterator[Callable[[], int]]:
            for span, frames in zip(step_spans(step.layout, step.encoding), self._decompressed, strict=True):
                yield partial(adopt_span, step, span, frames)

        state.checksum = reduce(xor, await run_jobs(workers, jobs()))
        state.version = self.commit.version
        self._decompressed.clear()


async def merge_round(
    log: RunLog,
    fragment: str,
    closing: ClosedItem,
    state: OuterState,  # of version closing.version - 1; untouched
    acc: Float32s,  # (numel,) overwritten; the result refers to it until it is adopted
    *,
    workers: Workers,
) -> MergeResult:
    """Computes the version that `closing` freezes, by the policy that it was closed under, and stores its update.

    Raises:
        ValueError: `state` is not of the version before.
        DamagedStateError: `state` has not its checksum.
        UnreadableDeltaError: a delta can't be read back, or drove the step out of the update's range: close the set
            again without it.
        StoreUnavailableError, StoreFullError: the same call may succeed later.
    """
    if state.version != closing.version - 1:
        raise ValueError(f"state is of another version. expected={closing.version - 1}, actual={state.version}")
    layout = log.spec.fragment(fragment)
    deltas = [log.state.deltas[member.delta].item for member in closing.members]
    if len(deltas) > most_members(layout):  # an earlier version froze it
        raise UnreadableDeltaError(deltas[-1].delta, ValueError("its set is too large for one commit"))
    policy = log.state.fragments[fragment].closing_policy or log.state.policy
    # Before anything is awaited: another replica's commit of this version would change what is known of the fragment.
    merged = _round(log.state, closing, policy)
    outer = _outer_step(log.state, closing, policy, merged)

    if merged.rule is MergeRule.MEDIAN:
        products = await inner_products(log, fragment, deltas, workers=workers)
        sizes = np.array(layout.sizes, np.float64)
        merged = replace(merged, median_shares=median_shares(merged.shares(), products, sizes))
    coefficients = merged.coefficients()
    await accumulate_deltas(log, fragment, deltas, coefficients, acc, workers=workers)
    sum_norms = np.empty(0)
    if merged.rule is not MergeRule.MEAN:
        sum_norms = np.sqrt(await workers.run(per_tensor_squared_norms, acc, layout))
    scalars = Scalars(
        np.float32(outer.rate),
        np.float32(outer.momentum),
        merged.tensor_scales(sum_norms),
        coefficients,
        np.float32(outer.decay),
        np.float32(outer.gain),
    )
    step = Step(layout, scalars, policy.update_encoding, state, acc)
    prepared = await _prepare(step, deltas, workers)
    digest = digest_of_spans(layout.numel, [span.pieces for span in prepared])
    update = await _write_update(log, step, closing.version, prepared)
    commit = CommittedItem(
        fragment, closing.version, closing.attempt, update, step.encoding, digest.hex(), scalars_to_record(scalars)
    )
    return MergeResult(commit, step, [span.decompressed for span in prepared])


def _round(state: RunState, closing: ClosedItem, policy: Policy) -> Round:
    fragment = state.fragments[closing.fragment]
    deltas = [state.deltas[member.delta].item for member in closing.members]
    norms = np.sqrt(np.array([delta.squared_norms for delta in deltas]))
    are_judged = policy.quarantine_ratio > 0
    return Round(
        policy.merge_rule(closing.fragment),
        weights=np.array([member.weight for member in closing.members]),
        norms=norms,
        step_counts=np.array([delta.step_count for delta in deltas], np.float64),
        length=state.closed_length(fragment, closing),
        inner_step_count=policy.inner_step_count,
        references=references(state, fragment, deltas) if are_judged else np.full_like(norms, np.inf),
    )


def _outer_step(state: RunState, closing: ClosedItem, policy: Policy, merged: Round) -> OuterStep:
    fragment = state.fragments[closing.fragment]
    step_count = fragment.versions[closing.version - 1].step_count
    momentum = momentum_at(
        policy.outer,
        momentum_steps=max(step_count - fragment.momentum_from, 0.0),
        run_steps=step_count,
        planned_step_count=policy.planned_step_count,
        inner_step_count=policy.inner_step_count,
    )
    rate = learning_rate_at(policy.outer, merged.rule, delta_count=len(merged.weights))
    round_count = closing.participation * merged.length / policy.inner_step_count
    return outer_step(policy.outer.name, rate, momentum, round_count=round_count)


async def _prepare(step: Step, deltas: Sequence[AcceptedItem], workers: Workers) -> list[PreparedSpan]:
    async def jobs() -> AsyncIterator[Callable[[], PreparedSpan]]:
        for span in step_spans(step.layout, step.encoding):
            yield partial(prepare_span, step, span)

    try:
        prepared = await run_jobs(workers, jobs())
    except NonFiniteError as error:
        if step.state.checksum not in (None, await workers.run(step.state.actual_checksum)):
            raise DamagedStateError(step.layout.name) from error
        # Accepted deltas are finite, so an overflow is due to one huge delta, and the round can go on without it.
        largest = max(deltas, key=lambda delta: math.fsum(delta.squared_norms) / max(delta.step_count, 1) ** 2)
        raise UnreadableDeltaError(largest.delta, error) from error
    if step.state.checksum not in (None, reduce(xor, (span.checksum for span in prepared))):
        raise DamagedStateError(step.layout.name)
    return prepared


async def _write_update(
    log: RunLog, step: Step, version: int, prepared: Sequence[PreparedSpan]
) -> tuple[ObjectRef, ...]:
    """Stores the update as objects of whole spans, each of `UPDATE_OBJECT_SPANS` spans."""
    spans, writes = step_spans(step.layout, step.encoding), []
    for at in range(0, len(spans), UPDATE_OBJECT_SPANS):
        held = slice(at, at + UPDATE_OBJECT_SPANS)
        first, stop = spans[held][0].first, spans[held][-1].stop
        frames = [frame for span in prepared[held] for frame in span.frames]
        writes.append(partial(log.blobs.write_update, step.layout.name, version, frames, first, stop - first))
    async with aclosing(in_order(writes, IN_FLIGHT)) as refs:
        return tuple([ref async for ref in refs])


_LOG: Final = get_logger(__name__)
_RETRY_S: Final = 0.5  # between two attempts to append a commit whose outcome the store can't tell
_LONGEST_CHAIN: Final = 512  # updates without a snapshot: to find which are kept takes time with its square
_FLOAT32_BYTES: Final = 4
_SNAPSHOT_KINDS: Final[tuple[SnapshotKind, ...]] = ("weights", "momentum", "residual")


class Merger:
    """Merges the rounds of one run on one replica, one round of a fragment at a time."""

    def __init__(self, log: RunLog, *, clock: Clock, workers: Workers, scratch: Scratch) -> None:
        """Starts with nothing cached."""
        self._log = log
        self._clock = clock
        self._workers = workers
        self._scratch = scratch
        self._states = OuterStates(log, workers, scratch)
        # By fragment: one task at a time uses its outer state.
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    def frozen_set(self, key: MergeKey) -> ClosedItem | None:
        """Returns the set that `key` names, or None once it was committed or closed again."""
        closing = self._log.state.fragments[key.fragment].closing
        is_current = closing is not None and (closing.version, closing.attempt) == (key.version, key.attempt)
        return closing if is_current else None

    async def merge(self, key: MergeKey) -> None:
        """Merges the set that `key` names and commits it; returns without effect if it is no longer current.

        Raises:
            UnreadableDeltaError: a member can't be read.
            StoreError: the store failed; nothing was committed.
        """
        state = self._log.state
        async with self._locks[key.fragment]:
            closing = self.frozen_set(key)
            if closing is None:
                return
            # A learner's merges in runs of its own take turns with those of a run that it shares with others.
            BEHALF.set(" ".join(sorted(state.deltas[member.delta].item.learner for member in closing.members)))
            with self._scratch.lent(state.fragments[key.fragment].layout.numel) as acc:
                await self._merge_with(acc, key, closing)

    async def _merge_with(self, acc: Float32s, key: MergeKey, closing: ClosedItem) -> None:
        fragment = self._log.state.fragments[key.fragment]
        started_s = self._clock.monotonic_s()
        for is_last in (False, True):
            outer = await self._states.at(fragment, key.version - 1)
            try:
                result = await merge_round(self._log, key.fragment, closing, outer, acc, workers=self._workers)
                break
            except DamagedStateError as error:
                _LOG.warning("cached state is dropped", fragment=key.fragment, cause=str(error))
                self._states.drop(key.fragment)
                del outer  # before it is made again
                if is_last:
                    raise
        await self._commit(key, result.commit)
        newest = fragment.versions.get(key.version)
        if newest is None or newest.commit is None or not result.is_same_version_as(newest.commit.commit):
            _LOG.info("merge was not used", fragment=key.fragment, version=key.version, attempt=key.attempt)
            return
        self._states.drop(key.fragment)  # if `adopt` fails, the state is torn
        outer = await self._states.writable(key.fragment, outer)
        await result.adopt(outer, workers=self._workers)
        await self._states.keep(key.fragment, outer, result.commit.digest)
        _LOG.info(
            "version committed",
            run=self._log.spec.name,
            fragment=key.fragment,
            version=key.version,
            delta_count=len(closing.members),
            merge_s=round(self._clock.monotonic_s() - started_s, 4),
        )

    async def _commit(self, key: MergeKey, item: CommittedItem) -> None:
        """Appends the commit, and again after an outage of the store while the set is current."""
        while self.frozen_set(key) is not None:
            try:
                await self._log.append([item])
                return
            except StoreUnavailableError as error:
                _LOG.warning("commit is not known to be durable yet", fragment=key.fragment, cause=str(error))
                await self._clock.sleep(_RETRY_S)

    async def restart(self, name: str) -> None:
        """Lets a fragment continue without momentum if its state can't be rebuilt (`skerry.syncer.restart`).

        Raises:
            StoreError: the store failed, or the weights are lost too.
        """
        async with self._locks[name]:
            await restart(self._log, name, self._workers, self._scratch)

    def wants_snapshot(self, name: str) -> bool:
        """Whether the updates since the fragment's last snapshot weigh more than one, by the ratio, or are many."""
        fragment = self._log.state.fragments[name]
        size_bytes = 0
        version = fragment.version
        while version >= 0 and not fragment.versions[version].weights:
            record = fragment.versions[version].commit
            assert record is not None  # a version has a commit or a snapshot
            size_bytes += sum(ref.size_bytes for ref in record.commit.update)
            version -= 1
        least_bytes = self._log.state.policy.snapshot_ratio * _FLOAT32_BYTES * fragment.layout.numel
        return 0 < size_bytes >= least_bytes or fragment.version - version >= _LONGEST_CHAIN

    async def snapshot(self, name: str) -> None:
        """Stores weights and outer state of the fragment's newest version, if they are in this replica's cache.

        No merge waits for it. Does nothing while an earlier snapshot of the fragment is being stored.

        Raises:
            StoreError: the store failed; the log names no snapshot.
        """
        fragment = self._log.state.fragments[name]
        with self._states.reading(fragment) as outer:
            if outer is None:
                return
            version, digest = outer.version, fragment.newest.digest
            weights, momentum, residual = [
                await self._log.blobs.write_snapshot(name, version, kind, snapshot_tensors(fragment.layout, values))
                for kind, values in zip(_SNAPSHOT_KINDS, (outer.weights, outer.momentum, outer.residual), strict=True)
            ]
            if not await self._states.is_sound(name, outer):  # the log has no digest of momentum and residual
                return
        await self._log.append([SnapshotItem(name, version, digest, (weights,), (momentum, residual))])
        _LOG.info("snapshot stored", run=self._log.spec.name, fragment=name, version=version)

    async def seed(self, name: str) -> None:
        """Makes version 0 of a draft's fragment from its first accepted push of initial weights, if there is one.

        Idempotent: a second snapshot of version 0, by any replica, has no effect.

        Raises:
            StoreError: the store failed; the fragment has no version yet.
            UnreadableObjectError: the stored push is not what was accepted.
        """
        async with self._locks[name]:
            await self._seed(name)

    async def _seed(self, name: str) -> None:
        fragment = self._log.state.fragments[name]
        if fragment.version != INITIAL_BASE or not fragment.pending:
            return
        source = next(iter(fragment.pending.values())).item
        layout = fragment.layout
        (weights,) = self._scratch.zeros(1, layout.numel)
        try:
            for part in source.parts:
                pieces = self._log.blobs.part_frames(part)
                async for batch in frame_batches(pieces, part.first, part.numel):
                    out = weights[batch.first : batch.first + batch.numel]
                    await self._workers.run(partial(decode_frames, batch.data, layout, out, first=batch.first))
        except FrameError as error:
            raise UnreadableObjectError(source.parts[0].name, f"initial weights. fragment={name}, {error}") from error
        digest = await weights_digest(weights, layout.leaf_hash, workers=self._workers)
        ref = await self._log.blobs.write_snapshot(name, 0, "weights", snapshot_tensors(layout, weights))
        await self._log.append([SnapshotItem(name, 0, digest, (ref,), ())])
        _LOG.info("initial weights stored", run=self._log.spec.name, fragment=name, numel=layout.numel)
