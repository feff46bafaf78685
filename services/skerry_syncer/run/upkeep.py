"""Keeps what a store holds small: log checkpoints, collections by a run's policy, and litter.

Every replica does so while it serves calls. Doing it twice is harmless, because the log has what another replica did
meanwhile, and it admits no collection of objects that rebuilding the newest versions needs.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

from skerry.runtime.logs import get_logger
from skerry_syncer.settings import ReplicaSettings
from skerry_syncer.store.errors import LogCorruptError, NewerFormatError
from skerry_syncer.store.log import checkpoints, retention
from skerry_syncer.store.log.entries import RunStatus
from skerry_syncer.store.maintenance.collecting import collect, plan_collection
from skerry_syncer.store.maintenance.drafts import delete_nameless, nameless_runs
from skerry_syncer.store.objects.put_if_absent import store_unix_s
from skerry_syncer.store.store import Store
from skerry_syncer.store.versions.run import Run

_LOG: Final = get_logger(__name__)
_LOOK_S: Final = 5.0  # between looks whether there is something to do, which cost nothing
# Of drafts since their newest object, of orphaned parts and of leases. Longer than any creation or push takes.
_LITTER_AGE_S: Final = 86_400.0


async def keep_small(
    run: Run, settings: ReplicaSettings, attempt: Callable[[Awaitable[object], str], Awaitable[bool]]
) -> None:
    """Checks in an endless loop if a checkpoint or a collection is due; `attempt` handles failures of the store."""
    log, clock = run.log, run.log.clock
    due_s = clock.monotonic_s() + settings.collection_look_s
    while True:
        if checkpoints.is_due(log.state, settings.checkpoint_every):
            await attempt(checkpoints.write_checkpoint(log), "checkpoint could not be stored")
        if run.blobs.is_full or clock.monotonic_s() >= due_s:
            if run.blobs.is_full or retention.is_due(log.state):
                await attempt(_collect(run), "collection failed")
            due_s = clock.monotonic_s() + settings.collection_look_s
        await clock.sleep(min(_LOOK_S, settings.collection_look_s))


async def _collect(run: Run) -> None:
    """Collects what the run's policy does not keep; of a draft nothing."""
    log, is_full = run.log, run.blobs.is_full
    if log.state.status is RunStatus.DRAFT:
        return
    before = await store_unix_s(log.objects, log.entropy) - _LITTER_AGE_S
    collected = await collect(log, await plan_collection(log, log.state.policy, litter_before_unix_s=before))
    run.blobs.is_full = False  # until the next blob finds no space
    facts = {"run": log.spec.name, "objects": len(collected.victims), "size_bytes": collected.size_bytes}
    if is_full and not collected.victims:
        _LOG.error("store is full, and the run's policy keeps all that it has of it", **facts)
    elif collected.victims:
        _LOG.info("collected", was_full=is_full, kept_bytes=collected.kept_bytes, **facts)


async def tidy(store: Store, open_run: Callable[[str, str], Awaitable[Run]]) -> None:
    """Deletes abandoned drafts, litter, and what their policies no longer keep, of all runs of the store.

    Leases of learners that are long gone are litter too. Objects that another replica deleted meanwhile are skipped. A
    run that can't be read is left as it is.

    Raises:
        StoreError: the store can't be read.
    """
    before = await store_unix_s(store.objects, store.entropy) - _LITTER_AGE_S
    for name in await store.objects.folders("runs"):
        try:
            for draft in await nameless_runs(store, name, modified_before_unix_s=before):
                if await delete_nameless(store, draft, modified_before_unix_s=before):
                    _LOG.info("draft expired", run=name, uid=draft.uid, size_bytes=draft.size_bytes)
        except (ValueError, LogCorruptError, NewerFormatError) as error:
            _LOG.warning("drafts of a name can't be looked for", run=name, cause=str(error))
    for name, uid in await store.list_runs():
        try:
            run = await open_run(name, uid)
            infos = store.objects.list(f"{run.log.prefix}/learners")
            await store.objects.delete([info.name async for info in infos if info.modified_at_unix_s < before])
            await _collect(run)
        except Exception as error:  # noqa: BLE001 - what one run has must not end the collection of all others
            _LOG.warning("run could not be collected", run=name, uid=uid, cause=repr(error))
