"""Deletes abandoned drafts and orphaned parts of deltas of all runs of a store: no log entry will name them.

Every replica does so ten minutes after its start and then every day, since it costs requests for every run. Objects
that another replica deleted meanwhile are skipped.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

from skerry.runtime.identifiers import Entropy
from skerry.runtime.logs import get_logger
from skerry_syncer.errors import SyncerError
from skerry_syncer.run.upkeep import may_collect
from skerry_syncer.store.errors import LogCorruptError, NewerFormatError, StoreError
from skerry_syncer.store.log.retention import Retention
from skerry_syncer.store.log.run_log import RunLog
from skerry_syncer.store.maintenance.collect import Why, collect
from skerry_syncer.store.maintenance.drafts import delete_nameless, nameless_runs
from skerry_syncer.store.objects.put_if_absent import store_unix_s
from skerry_syncer.store.store import Store

_LOG: Final = get_logger(__name__)
# Of drafts since their newest object, and of orphaned parts. Longer than any creation or push takes.
LITTER_AGE_S: Final = 86_400.0


async def tidy(store: Store, entropy: Entropy, open_log: Callable[[str, str], Awaitable[RunLog]]) -> None:
    """Tidies every run once; one that can't be read is left as it is.

    Raises:
        StoreError: the store can't be read.
    """
    now_unix_s = await store_unix_s(store.objects, entropy)
    before = now_unix_s - LITTER_AGE_S
    for name in await store.objects.folders("runs"):
        try:
            for draft in await nameless_runs(store, name, modified_before_unix_s=before):
                if await delete_nameless(store, draft, modified_before_unix_s=before):
                    _LOG.info("draft expired", run=name, uid=draft.uid, size_bytes=draft.size_bytes)
        except (ValueError, LogCorruptError, NewerFormatError) as error:
            _LOG.warning("drafts of a name can't be looked for", run=name, cause=str(error))
    for name, uid in await store.list_runs():
        try:
            log = await open_log(name, uid)
            if may_collect(log):
                await _collect_litter(log, now_unix_s)
        except (StoreError, SyncerError) as error:
            _LOG.warning("litter of a run could not be collected", run=name, uid=uid, cause=str(error))


async def _collect_litter(log: RunLog, now_unix_s: float) -> None:
    kept = Retention.of(log.state.policy)
    went = await collect(log, kept, now_unix_s=now_unix_s, only=frozenset({Why.LITTER, Why.CONDEMNED}))
    if went.victims:
        _LOG.info("litter collected", run=log.spec.name, objects=len(went.victims), size_bytes=went.size_bytes)
