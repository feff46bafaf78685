"""Keeps a run small: stores log checkpoints, and collects what the run's policy does not keep.

Every replica does so while it serves calls. Doing it twice is harmless, because the log has what another replica did
meanwhile, and it admits no collection of objects that rebuilding the newest versions needs.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

from skerry.runtime.clock import Clock
from skerry.runtime.logs import get_logger
from skerry.store.log import checkpoints, retention
from skerry.store.log.entries import CHECKPOINTS_FORMAT, RunStatus
from skerry.store.log.run_log import RunLog
from skerry.store.operator.collect import collect
from skerry.syncer.settings import ReplicaSettings

_LOG: Final = get_logger(__name__)
_LOOK_S: Final = 5.0  # between looks whether there is something to do, which cost nothing


async def keep_small(
    log: RunLog, clock: Clock, settings: ReplicaSettings, attempt: Callable[[Awaitable[object], str], Awaitable[bool]]
) -> None:
    """Checks in an endless loop if a checkpoint or a collection is due; `attempt` handles failures of the store."""
    looked_at_s = clock.monotonic_s()
    while True:
        if checkpoints.is_due(log.state, settings.checkpoint_every):
            await attempt(checkpoints.write_checkpoint(log), "checkpoint could not be stored")
        is_full, now_s = log.blobs.is_full, clock.monotonic_s()
        if may_collect(log) and (is_full or now_s - looked_at_s >= settings.collection_look_s):
            looked_at_s = now_s
            if is_full or retention.is_due(log.state):
                await attempt(_collect(log, clock, is_full=is_full), "collection failed")
        await clock.sleep(min(_LOOK_S, settings.collection_look_s))


def may_collect(log: RunLog) -> bool:
    """Whether syncers collect objects of the run by themselves."""
    return log.state.level >= CHECKPOINTS_FORMAT and log.state.status is not RunStatus.DRAFT


async def _collect(log: RunLog, clock: Clock, *, is_full: bool) -> None:
    kept = retention.Retention.of(log.state.policy)
    went = await collect(log, kept, now_unix_s=clock.unix_s())
    log.blobs.is_full = False  # until the next blob finds no space
    facts = {"run": log.spec.name, "objects": len(went.victims), "size_bytes": went.size_bytes}
    if is_full and not went.victims:
        _LOG.error("store is full, and the run's policy keeps all that it has of it", **facts)
    else:
        _LOG.info("collected", was_full=is_full, kept_bytes=went.kept_bytes, **facts)
