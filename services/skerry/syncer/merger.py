"""Turns frozen sets into versions: runs the arithmetic on worker threads, commits the result, and stores snapshots.

The outer state of each fragment (weights, momentum, residual) is cached in scratch between merges. The cache is used
only if its version and digest are in the log; otherwise the state is rebuilt from a snapshot and the deltas after it.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import dataclass
from typing import Final

import numpy as np
import structlog
from numpy.typing import NDArray

from skerry.algorithm.step import OuterState
from skerry.runtime.clock import Clock
from skerry.runtime.workers import Workers
from skerry.store.errors import LogCorruptError, StoreUnavailableError
from skerry.store.log.entries import INITIAL_BASE, ClosedItem, CommittedItem, SnapshotItem
from skerry.store.log.run_log import RunLog
from skerry.store.log.state import FragmentState
from skerry.store.versions.blobs import SnapshotKind
from skerry.store.versions.frame_stream import frame_batches
from skerry.store.versions.replay import Replayer, snapshot_tensors, weights_digest
from skerry.store.versions.scratch import Scratch
from skerry.syncer.merge import merge_round
from skerry.syncer.rounds import MergeKey
from skerry.wire.errors import FrameError
from skerry.wire.frames import decode_frames
from skerry.wire.layout import FragmentLayout

_LOG: Final = structlog.get_logger(__name__)
# Pause between two attempts to append a commit whose outcome the store can't tell.
_RETRY_S: Final = 0.5
_FLOAT32_BYTES: Final = 4
_SNAPSHOT_KINDS: Final[tuple[SnapshotKind, ...]] = ("weights", "momentum", "residual")


@dataclass
class _Cached:
    """A fragment's outer state and the digest that the log has for its version."""

    outer: OuterState
    digest: str


class Merger:
    """Merges the rounds of one run on one replica, one round of a fragment at a time."""

    def __init__(self, log: RunLog, *, clock: Clock, workers: Workers, scratch: Scratch) -> None:
        """Starts with nothing cached."""
        self._log = log
        self._clock = clock
        self._workers = workers
        self._scratch = scratch
        self._cache: dict[str, _Cached] = {}
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
        async with self._locks[key.fragment]:
            await self._merge(key)

    async def _merge(self, key: MergeKey) -> None:
        fragment = self._log.state.fragments[key.fragment]
        closing = self.frozen_set(key)
        if closing is None:
            return
        started_s = self._clock.monotonic_s()
        outer = await self._outer_at(fragment, key.version - 1)
        self._cache[key.fragment] = _Cached(outer, fragment.versions[key.version - 1].digest)
        result = await merge_round(
            self._log, key.fragment, closing, outer, workers=self._workers, scratch=self._scratch
        )
        await self._commit(key, result.commit_item())
        newest = fragment.versions.get(key.version)
        if newest is None or newest.commit is None or not result.is_same_version_as(newest.commit.commit):
            _LOG.info("merge was not used", fragment=key.fragment, version=key.version, attempt=key.attempt)
            return
        del self._cache[key.fragment]  # if `adopt` fails, the state is torn
        await result.adopt(workers=self._workers)
        self._cache[key.fragment] = _Cached(outer, result.digest)
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

    async def _outer_at(self, fragment: FragmentState, version: int) -> OuterState:
        """Returns the outer state of `version`, advanced from the cache if that is in the log, else rebuilt."""
        name = fragment.layout.name
        replayer = Replayer(self._log, name, self._workers)
        cached = self._cache.pop(name, None)  # removed while it changes, so that a failure leaves no torn state behind
        if cached is not None and 0 <= cached.outer.version <= version:
            known = fragment.versions.get(cached.outer.version)
            if known is not None and known.digest == cached.digest and not known.is_abandoned:
                await replayer.advance(cached.outer, version, self._scratch)
                return cached.outer
        return await replayer.rebuild(version, self._scratch)

    def wants_snapshot(self, name: str) -> bool:
        """Whether the updates since the fragment's last snapshot weigh more than one, by the policy's ratio."""
        fragment = self._log.state.fragments[name]
        size_bytes = 0
        version = fragment.version
        while version >= 0 and not fragment.versions[version].weights:
            record = fragment.versions[version].commit
            assert record is not None  # a version has a commit or a snapshot
            size_bytes += sum(ref.size_bytes for ref in record.commit.update)
            version -= 1
        snapshot_bytes = _FLOAT32_BYTES * fragment.layout.numel
        return size_bytes > 0 and size_bytes >= self._log.state.policy.snapshot_ratio * snapshot_bytes

    async def snapshot(self, name: str) -> None:
        """Stores weights and outer state of the fragment's newest version, if they are in this replica's cache.

        Raises:
            StoreError: the store failed; the log names no snapshot.
        """
        async with self._locks[name]:
            await self._snapshot(name)

    async def _snapshot(self, name: str) -> None:
        fragment = self._log.state.fragments[name]
        cached = self._cache.get(name)
        if cached is None or cached.outer.version != fragment.version or cached.digest != fragment.newest.digest:
            return
        outer = cached.outer
        weights, momentum, residual = [
            await self._log.blobs.write_snapshot(name, outer.version, kind, snapshot_tensors(fragment.layout, values))
            for kind, values in zip(_SNAPSHOT_KINDS, (outer.weights, outer.momentum, outer.residual), strict=True)
        ]
        item = SnapshotItem(name, outer.version, cached.digest, (weights,), (momentum, residual))
        await self._log.append([item])
        _LOG.info("snapshot stored", run=self._log.spec.name, fragment=name, version=outer.version)

    async def seed(self, name: str) -> None:
        """Makes version 0 of a draft's fragment from its first accepted push of initial weights, if there is one.

        Idempotent: a second snapshot of version 0, by any replica, has no effect.

        Raises:
            StoreError: the store failed; the fragment has no version yet.
            LogCorruptError: the stored push is not what was accepted.
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
                    await self._workers.run(_decode, batch.data, layout, out, batch.first)
        except FrameError as error:
            raise LogCorruptError(f"initial weights can't be read. fragment={name}, cause={error}") from error
        digest = await weights_digest(weights, workers=self._workers)
        ref = await self._log.blobs.write_snapshot(name, 0, "weights", snapshot_tensors(layout, weights))
        await self._log.append([SnapshotItem(name, 0, digest, (ref,), ())])
        _LOG.info("initial weights stored", run=self._log.spec.name, fragment=name, numel=layout.numel)


def _decode(data: bytes, layout: FragmentLayout, out: NDArray[np.float32], first: int) -> None:
    decode_frames(data, layout, out, first=first)
