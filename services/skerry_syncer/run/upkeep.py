"""Keeps a run small: stores log checkpoints, and collects what the run's policy does not keep.

Every replica does so while it serves calls. Doing it twice is harmless, because the log has what another replica did
meanwhile, and it admits no collection of objects that rebuilding the newest versions needs.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Final

from skerry.runtime.clock import Clock
from skerry.runtime.logs import get_logger
from skerry_syncer.settings import RUN_BYTES, RUN_TIMES, ReplicaSettings
from skerry_syncer.store.log import checkpoints, retention
from skerry_syncer.store.log.entries import CHECKPOINTS_FORMAT, RunStatus
from skerry_syncer.store.log.run_log import RunLog
from skerry_syncer.store.maintenance.collect import collect
from skerry_syncer.store.objects.put_if_absent import store_unix_s

_LOG: Final = get_logger(__name__)
_LOOK_S: Final = 5.0  # between looks whether there is something to do, which cost nothing
# The share of the event loop's time that is spent on that where a run's history is long.
_LOOK_SHARE: Final = 0.01


async def keep_small(
    log: RunLog, clock: Clock, settings: ReplicaSettings, attempt: Callable[[Awaitable[object], str], Awaitable[bool]]
) -> None:
    """Checks in an endless loop if a checkpoint or a collection is due; `attempt` handles failures of the store."""
    _measure(log, settings)
    due_s = clock.monotonic_s() + settings.collection_look_s
    while True:
        if checkpoints.is_due(log.state, settings.checkpoint_every):
            await attempt(checkpoints.write_checkpoint(log), "checkpoint could not be stored")
        is_full, now_s = log.blobs.is_full, clock.monotonic_s()
        if is_full or now_s >= due_s:
            is_due, took_s = may_collect(log) and retention.is_due(log.state), clock.monotonic_s() - now_s
            if is_due or (may_collect(log) and (is_full or log.blobs.is_too_large)):
                await attempt(_collect(log, is_full=is_full), "collection failed")
            now_s = clock.monotonic_s()
            _measure(log, settings)
            took_s += clock.monotonic_s() - now_s
            due_s = now_s + max(settings.collection_look_s, took_s / _LOOK_SHARE)
        await clock.sleep(min(_LOOK_S, settings.collection_look_s))


def may_collect(log: RunLog) -> bool:
    """Whether syncers collect objects of the run by themselves."""
    return log.state.level >= CHECKPOINTS_FORMAT and log.state.status is not RunStatus.DRAFT


def _measure(log: RunLog, settings: ReplicaSettings) -> None:
    """Finds out if the run has more in the store than it may have."""
    limit_bytes = settings.run_bytes
    if limit_bytes is None:
        limit_bytes = RUN_BYTES + RUN_TIMES * 4 * sum(layout.numel for layout in log.spec.fragments)
    size_bytes = retention.size_bytes(log.state)
    if (is_too_large := size_bytes > limit_bytes) and not log.blobs.is_too_large:
        facts = {"run": log.spec.name, "size_bytes": size_bytes, "limit_bytes": limit_bytes}
        _LOG.error("run has more in the store than it may have, and takes no more deltas", **facts)
    log.blobs.is_too_large = is_too_large


async def _collect(log: RunLog, *, is_full: bool) -> None:
    kept = replace(retention.Retention.of(log.state.policy), keeps_quarantined=not log.blobs.is_too_large)
    went = await collect(log, kept, now_unix_s=await store_unix_s(log.objects, log.entropy))
    log.blobs.is_full = False  # until the next blob finds no space
    facts = {"run": log.spec.name, "objects": len(went.victims), "size_bytes": went.size_bytes}
    if is_full and not went.victims:
        _LOG.error("store is full, and the run's policy keeps all that it has of it", **facts)
    else:
        _LOG.info("collected", was_full=is_full, kept_bytes=went.kept_bytes, **facts)
