"""Merges a round's frozen set of deltas into the next version of a fragment.

    merge_round        scalars from the recorded norms, the deltas' weighted sum, the quantised update, made durable
      -> MergeResult   what the commit names; the caller appends it
      -> adopt()       once the log has the commit, takes the outer state to the new version in place

Until `adopt` the outer state is untouched, so a merge that fails, or that another replica won, costs nothing but its
own work. At most the state (3 arrays), the sum (1) and the encoded update are held, however many learners there are.

Source: Decoupled DiLoCo (arXiv 2604.21428), radial-directional averaging and outer optimizer.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from skerry.algorithm.merge import Round, per_tensor_squared_norms
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
from skerry.runtime.workers import Workers, run_jobs
from skerry.store.log.entries import AcceptedItem, ClosedItem, CommittedItem, MergeScalars, ObjectRef
from skerry.store.log.run_log import RunLog
from skerry.store.log.state import RunState
from skerry.store.versions.replay import UnreadableDeltaError, accumulate_deltas
from skerry.store.versions.scalars import scalars_to_record
from skerry.store.versions.scratch import Scratch
from skerry.wire.codecs import Encoding
from skerry.wire.errors import NonFiniteError
from skerry.wire.layout import FragmentLayout
from skerry.wire.policy import MergeRule, Policy

# Spans, of 2^20 elements, in one object of an update; a larger fragment has several, to be fetched side by side.
UPDATE_OBJECT_SPANS: Final = 64


@dataclass
class MergeResult:
    """A version that is durable but not committed: what its commit names, and what adopting it takes."""

    scalars: MergeScalars
    update: tuple[ObjectRef, ...]
    encoding: Encoding
    digest: str  # tree digest of the new weights, hex
    _closing: ClosedItem = field(repr=False)
    _step: Step = field(repr=False)
    _prepared: list[PreparedSpan] = field(repr=False)

    def commit_item(self) -> CommittedItem:
        """Returns the item to append."""
        return CommittedItem(
            self._closing.fragment,
            self._closing.version,
            self._closing.attempt,
            self.update,
            self.encoding,
            self.digest,
            self.scalars,
        )

    def is_same_version_as(self, commit: CommittedItem) -> bool:
        """Whether `commit`, maybe another replica's, names this arithmetic: only then may this merge be adopted."""
        mine = (self._closing.version, self._closing.attempt, self.scalars, self.encoding, self.digest)
        return mine == (commit.version, commit.attempt, commit.scalars, commit.encoding, commit.digest)

    async def adopt(self, *, workers: Workers) -> None:
        """Takes the outer state that the merge began from to the new version, in place. To be called once.

        Nobody else may read or write the state meanwhile. If it fails, or is cancelled, the state is torn and has to be
        rebuilt (`skerry.store.versions.replay.Replayer`).
        """
        step = self._step
        step.state.version = TORN

        async def jobs() -> AsyncIterator[Callable[[], None]]:
            for span, prepared in zip(step_spans(step.layout, step.encoding), self._prepared, strict=True):
                yield partial(adopt_span, step, span, prepared.frames)

        await run_jobs(workers, jobs())
        step.state.version = self._closing.version
        self._prepared.clear()


async def merge_round(
    log: RunLog,
    fragment: str,
    closing: ClosedItem,
    state: OuterState,  # of version closing.version - 1; untouched
    *,
    workers: Workers,
    scratch: Scratch,
) -> MergeResult:
    """Computes the version that `closing` freezes, by the policy that it was closed under, and stores its update.

    Raises:
        ValueError: `state` is not of the version before.
        UnreadableDeltaError: a delta can't be read back, or drove the step out of the update's range: close the set
            again without it.
        StoreUnavailableError, StoreFullError: the same call may succeed later.
    """
    if state.version != closing.version - 1:
        raise ValueError(f"state is of another version. expected={closing.version - 1}, actual={state.version}")
    layout = log.spec.fragment(fragment)
    deltas = [log.state.deltas[member.delta].item for member in closing.members]
    policy = log.state.fragments[fragment].closing_policy or log.state.policy
    # Before anything is awaited: another replica's commit of this version would change what is known of the fragment.
    merged = _round(log.state, closing, policy)
    outer = _outer_step(log.state, closing, policy, merged)

    coefficients = merged.coefficients()
    (acc,) = scratch.zeros(1, layout.numel)
    await accumulate_deltas(log, fragment, deltas, coefficients, acc, workers=workers)
    sum_norms = await _norms(acc, layout, workers) if merged.rule is MergeRule.RDA else np.empty(0)
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
    return MergeResult(scalars_to_record(scalars), update, step.encoding, digest.hex(), closing, step, prepared)


def _round(state: RunState, closing: ClosedItem, policy: Policy) -> Round:
    deltas = [state.deltas[member.delta].item for member in closing.members]
    return Round(
        policy.merge_rule(closing.fragment),
        weights=np.array([member.weight for member in closing.members]),
        norms=np.sqrt(np.array([delta.squared_norms for delta in deltas])),
        step_counts=np.array([delta.step_count for delta in deltas], np.float64),
        length=state.closed_length(state.fragments[closing.fragment], closing),
        inner_step_count=policy.inner_step_count,
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


async def _norms(acc: Float32s, layout: FragmentLayout, workers: Workers) -> NDArray[np.float64]:
    """Returns (tensors,) the norm of each tensor, summed in one order whatever the number of threads."""

    async def jobs() -> AsyncIterator[Callable[[], tuple[int, NDArray[np.float64]]]]:
        for first in range(0, layout.numel, _NORM_NUMEL):
            yield partial(_range_norms, acc, layout, first)

    total = np.zeros(len(layout.tensors))
    for index, part in await run_jobs(workers, jobs()):
        total[index : index + len(part)] += part
    return np.sqrt(total)


_NORM_NUMEL: Final = 2**21


def _range_norms(acc: Float32s, layout: FragmentLayout, first: int) -> tuple[int, NDArray[np.float64]]:
    """Returns the first tensor of the range, and the squared norms from that one to its last."""
    values = acc[first : first + _NORM_NUMEL]
    low, high = layout.tensor_at(first), layout.tensor_at(first + len(values) - 1)
    return low, per_tensor_squared_norms(values, layout, first)[low : high + 1]


async def _prepare(step: Step, deltas: Sequence[AcceptedItem], workers: Workers) -> list[PreparedSpan]:
    async def jobs() -> AsyncIterator[Callable[[], PreparedSpan]]:
        for span in step_spans(step.layout, step.encoding):
            yield partial(prepare_span, step, span)

    try:
        return await run_jobs(workers, jobs())
    except NonFiniteError as error:
        # Accepted deltas are finite; what overflows comes of one that is huge, and without it the round goes on.
        largest = max(deltas, key=lambda delta: math.fsum(delta.squared_norms) / max(delta.step_count, 1) ** 2)
        raise UnreadableDeltaError(largest.delta, error) from error


async def _write_update(
    log: RunLog, step: Step, version: int, prepared: Sequence[PreparedSpan]
) -> tuple[ObjectRef, ...]:
    """Stores the update as objects of whole spans, each of `UPDATE_OBJECT_SPANS` spans."""
    spans = step_spans(step.layout, step.encoding)
    refs = []
    for at in range(0, len(spans), UPDATE_OBJECT_SPANS):
        held = slice(at, at + UPDATE_OBJECT_SPANS)
        first, stop = spans[held][0].first, spans[held][-1].stop
        refs.append(
            await log.blobs.write_update(step.layout.name, version, _frames(prepared[held]), first, stop - first)
        )
    return tuple(refs)


async def _frames(prepared: Sequence[PreparedSpan]) -> AsyncIterator[bytes]:
    for span in prepared:
        for frame in span.frames:
            yield frame
