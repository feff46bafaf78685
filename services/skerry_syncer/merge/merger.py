"""Turns frozen sets of deltas into versions: merges, commits and snapshots.

    merge_round        scalars from the recorded norms, the deltas' weighted sum, and the quantised update; in the same
                       sweep as the update is made, the outer state goes to the new version
      -> MergeResult   stores the update, for a commit that names it and which `Merger` appends

The state is ahead of the log until the commit is in it. If that fails for good, because the set was closed again or
another replica committed other arithmetic, the state is dropped, and made again from the store.
At most the state (3 arrays), the sum (1) and the encoded update are held, however many learners there are; and the
state before (3), while a snapshot of it is being written. `skerry.algorithm` has the arithmetic; threads do it.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import numpy as np
from msgspec import structs

from skerry.algorithm.merge import Round
from skerry.algorithm.outer import OuterStep, learning_rate_at, momentum_at, outer_step
from skerry.algorithm.step import (
    AdvancedSpan,
    Float32s,
    OuterState,
    Scalars,
    Step,
    advance_span,
)
from skerry.runtime.logs import get_logger
from skerry.runtime.workers import IN_FLIGHT, in_order
from skerry.wire.errors import NonFiniteError
from skerry.wire.policy import MergeRule, Policy
from skerry.wire.quantise import per_tensor_squared_norms
from skerry_syncer.merge.outer_states import OuterStates
from skerry_syncer.rounds.closing import references
from skerry_syncer.store.errors import StoreFullError, StoreUnavailableError, UnreadableObjectError
from skerry_syncer.store.log.entries import INITIAL_BASE, ClosedItem, CommittedItem, ObjectRef, SnapshotItem
from skerry_syncer.store.log.state import RunState
from skerry_syncer.store.versions.blobs import SnapshotKind
from skerry_syncer.store.versions.replay import (
    UnreadableDeltaError,
    accumulate_deltas,
    scalars_to_record,
    take_step,
    weights_digest,
)
from skerry_syncer.store.versions.run import Run
from skerry_syncer.store.versions.scratch import Scratch

_LOG: Final = get_logger(__name__)
_LONGEST_CHAIN: Final = 512  # updates without a snapshot: to find which are kept takes time with its square
_FLOAT32_BYTES: Final = 4
_SNAPSHOT_KINDS: Final[tuple[SnapshotKind, ...]] = ("weights", "momentum", "residual")
# Of a tensor of a delta. No sum of deltas below it leads out of a codec's range, which ends at 2^127.
_LARGEST_SQUARED_NORM: Final = 2.0**200
# Spans, of 2^20 elements, in one object of an update. Learners fetch several objects at once.
UPDATE_OBJECT_SPANS: Final = 8


@dataclass
class MergeResult:
    """A version that an outer state has come to, and that no other process knows of yet."""

    closing: ClosedItem
    commit: CommittedItem  # without the update's objects
    state: OuterState
    _run: Run = field(repr=False)
    _advanced: Sequence[AdvancedSpan] = field(repr=False)
    _refs: dict[int, ObjectRef] = field(default_factory=dict)  # of the update's objects, by their first span

    def is_same_version_as(self, other: CommittedItem) -> bool:
        """Whether `other`, maybe another replica's, names this arithmetic: only then is the state the log's."""
        return structs.replace(other, update=()) == self.commit

    async def stored(self) -> CommittedItem:
        """Stores what is not stored of the update, and returns the commit that names all of it.

        Raises:
            StoreUnavailableError, StoreFullError: the same call may succeed later.
        """
        async with aclosing(in_order(self._missing(), IN_FLIGHT)) as stored:
            async for _ in stored:
                pass
        return structs.replace(self.commit, update=tuple(ref for _, ref in sorted(self._refs.items())))

    async def _missing(self) -> AsyncIterator[Callable[[], Awaitable[None]]]:
        for first_span in range(0, len(self._advanced), UPDATE_OBJECT_SPANS):
            if first_span not in self._refs:
                yield partial(self._store, first_span)

    async def _store(self, first_span: int) -> None:
        held = self._advanced[first_span : first_span + UPDATE_OBJECT_SPANS]
        first, stop = held[0].span.first, held[-1].span.stop
        frames = [frame for advanced in held for frame in advanced.frames]
        place = self.commit.fragment, self.commit.version
        self._refs[first_span] = await self._run.blobs.write_update(*place, frames, first, stop - first)


async def merge_round(
    run: Run,
    closing: ClosedItem,
    state: OuterState,  # of version closing.version - 1, then of closing.version; TORN if it fails on the way
    acc: Float32s,  # (numel,) overwritten
) -> MergeResult:
    """Takes `state` to the version that `closing` freezes, by the policy that it was closed under.

    Nobody else may use `state` meanwhile. It is as it was if a delta can't be read.

    Raises:
        UnreadableDeltaError: a delta can't be read back, or is too large: close the set again without it.
        StoreUnavailableError: the same call may succeed later.
    """
    fragment = run.state.fragments[closing.fragment]
    layout = fragment.layout
    deltas = [run.state.deltas[member.delta].item for member in closing.members]
    largest = max(deltas, key=lambda delta: max(delta.squared_norms))
    if max(largest.squared_norms) > _LARGEST_SQUARED_NORM:
        raise UnreadableDeltaError(largest.delta, ValueError("its norm is out of range"))
    policy = fragment.closing_policy or run.state.policy
    # Before anything is awaited: another replica's commit of this version would change what is known of the fragment.
    merged = _round(run.state, closing, policy)
    outer = _outer_step(run.state, closing, policy, merged)
    coefficients = merged.coefficients()
    await accumulate_deltas(run, closing.fragment, deltas, coefficients, acc)
    sum_norms = np.empty(0)
    if merged.rule is not MergeRule.MEAN:
        sum_norms = np.sqrt(await run.workers.run(per_tensor_squared_norms, acc, layout))
    scalars = Scalars(
        np.float32(outer.rate),
        np.float32(outer.momentum),
        merged.tensor_scales(sum_norms),
        coefficients,
        np.float32(outer.decay),
        np.float32(outer.gain),
    )
    step = Step(layout, scalars, policy.update_encoding, state, acc)
    try:
        advanced, digest = await take_step(step, closing.version, partial(advance_span, step), workers=run.workers)
    except NonFiniteError as error:
        raise UnreadableDeltaError(largest.delta, error) from error
    commit = CommittedItem(
        closing.fragment, closing.version, closing.attempt, (), step.encoding, digest, scalars_to_record(scalars)
    )
    return MergeResult(closing, commit, state, run, advanced)


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
        length=closing.length,
        inner_step_count=policy.inner_step_count,
        references=references(state, fragment, deltas) if are_judged else np.full_like(norms, np.inf),
    )


def _outer_step(state: RunState, closing: ClosedItem, policy: Policy, merged: Round) -> OuterStep:
    fragment = state.fragments[closing.fragment]
    base, planned = fragment.versions[closing.version - 1], policy.planned_token_count
    momentum = momentum_at(
        policy.outer,
        momentum_steps=max(base.step_count - fragment.momentum_from, 0.0),
        run_steps=base.step_count,
        share=base.token_count / planned if planned else 0.0,
        inner_step_count=policy.inner_step_count,
    )
    rate = learning_rate_at(policy.outer, merged.rule, delta_count=len(merged.weights))
    round_count = closing.participation * merged.length / policy.inner_step_count
    return outer_step(policy.outer.name, rate, momentum, round_count=round_count)


class Merger:
    """Merges the rounds of one run on one replica, one round of a fragment at a time."""

    def __init__(self, run: Run, scratch: Scratch) -> None:
        """Starts with nothing cached."""
        self._run = run
        self._scratch = scratch
        self._states = OuterStates(run, scratch)
        self._unstored: dict[str, MergeResult] = {}  # by fragment: a version that the store failed to take
        # By fragment: one task at a time uses its outer state.
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    def is_current(self, closing: ClosedItem) -> bool:
        """Whether the set is neither committed nor closed again."""
        return self._run.state.fragments[closing.fragment].closing == closing

    async def merge(self, closing: ClosedItem) -> None:
        """Merges a frozen set and commits the version; commits nothing if the set is no longer current.

        What the store failed to take is kept in memory, and the next call stores the same.

        Raises:
            UnreadableDeltaError: a member can't be read.
            StoreError: the store failed.
        """
        name = closing.fragment
        async with self._locks[name]:
            result = self._unstored.pop(name, None)
            if result is not None and result.closing != closing:
                self._settle(result)
                result = None
            if self.is_current(closing):
                result = result or await self._merged(closing)
                try:
                    await self._run.log.append([await result.stored()])
                except (StoreUnavailableError, StoreFullError):
                    self._unstored[name] = result
                    raise
            if result is not None:
                self._settle(result)

    async def _merged(self, closing: ClosedItem) -> MergeResult:
        fragment = self._run.state.fragments[closing.fragment]
        outer = await self._states.take(fragment, closing.version - 1)
        try:
            with self._scratch.lent(fragment.layout.numel) as acc:
                return await merge_round(self._run, closing, outer, acc)
        except BaseException:
            if outer.version == closing.version - 1:  # nothing was changed
                self._states.keep(closing.fragment, outer)
            raise

    def _settle(self, result: MergeResult) -> None:
        """Caches the state of a version that the log names, and drops that of another."""
        name, version = result.commit.fragment, result.commit.version
        known = self._run.state.fragments[name].versions.get(version)
        if known is None or known.commit is None or not result.is_same_version_as(known.commit.commit):
            _LOG.info("merge was not used", fragment=name, version=version, attempt=result.commit.attempt)
            return
        self._states.keep(name, result.state)
        count = len(result.closing.members)
        _LOG.info("version committed", run=self._run.spec.name, fragment=name, version=version, delta_count=count)

    def wants_snapshot(self, name: str) -> bool:
        """Whether the updates since the fragment's last snapshot weigh more than one, by the ratio, or are many."""
        fragment = self._run.state.fragments[name]
        chain = self._run.state.chain(fragment, fragment.version)
        updates = [version.weights_refs for version in chain if not version.weights]
        size_bytes = sum(ref.size_bytes for refs in updates for ref in refs)
        least_bytes = self._run.state.policy.snapshot_ratio * _FLOAT32_BYTES * fragment.layout.numel
        return 0 < size_bytes >= least_bytes or len(updates) >= _LONGEST_CHAIN

    async def snapshot(self, name: str) -> None:
        """Stores weights and outer state of the fragment's newest version, if they are in this replica's cache.

        No merge waits for it. Does nothing while an earlier snapshot of the fragment is being stored.

        Raises:
            StoreError: the store failed; the log names no snapshot.
        """
        fragment = self._run.state.fragments[name]
        with self._states.reading(fragment) as outer:
            if outer is None:
                return
            version, digest = outer.version, fragment.newest.digest
            weights, momentum, residual = [
                await self._run.blobs.write_snapshot(fragment.layout, version, kind, values)
                for kind, values in zip(_SNAPSHOT_KINDS, (outer.weights, outer.momentum, outer.residual), strict=True)
            ]
        await self._run.log.append([SnapshotItem(name, version, digest, (weights,), (momentum, residual))])
        _LOG.info("snapshot stored", run=self._run.spec.name, fragment=name, version=version)

    async def seed(self, name: str) -> None:
        """Makes version 0 of a draft's fragment from its first accepted push of initial weights, if there is one.

        Idempotent: a second snapshot of version 0, by any replica, has no effect.

        Raises:
            StoreError: the store failed; the fragment has no version yet.
            UnreadableObjectError: the stored push is not what was accepted.
        """
        async with self._locks[name]:
            fragment = self._run.state.fragments[name]
            if fragment.version != INITIAL_BASE or not fragment.pending:
                return
            pushed = next(iter(fragment.pending.values())).item
            (weights,) = self._scratch.zeros(1, fragment.layout.numel)
            unscaled = np.ones((1, len(fragment.layout.tensors)), np.float32)
            try:
                await accumulate_deltas(self._run, name, [pushed], unscaled, weights)
            except UnreadableDeltaError as error:
                raise UnreadableObjectError(
                    pushed.parts[0].name, f"initial weights. fragment={name}, {error}"
                ) from error
            digest = await weights_digest(weights, workers=self._run.workers)
            ref = await self._run.blobs.write_snapshot(fragment.layout, 0, "weights", weights)
            await self._run.log.append([SnapshotItem(name, 0, digest, (ref,), ())])
            _LOG.info("initial weights stored", run=self._run.spec.name, fragment=name, numel=fragment.layout.numel)
