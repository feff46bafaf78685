"""Deletes whole runs that have no name: drafts whose creation was abandoned and, if asked to, deleted runs.

A run counts as an abandoned draft if no object of its name has its uid and its newest object is old. `run.json` is
deleted first, because the run can't be opened without it. Then the run is checked once more: if its creator came back
meanwhile, `run.json` is restored. Only then is the rest deleted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from skerry.wire.layout import BadNameError, check_id
from skerry_syncer.store.errors import ObjectMissingError
from skerry_syncer.store.log.entries import entry_name, run_prefix
from skerry_syncer.store.objects.interface import ObjectInfo
from skerry_syncer.store.store import Store


@dataclass(frozen=True)
class NamelessRun:
    """A run that may be deleted as a whole."""

    name: str
    uid: str
    was_named: bool  # it was deleted; else it is a draft, which never had the name
    object_count: int
    size_bytes: int

    @property
    def kind(self) -> str:
        """What it is called."""
        return "deleted run" if self.was_named else "draft"


async def nameless_runs(
    store: Store, name: str, *, modified_before_unix_s: float, includes_deleted: bool = False
) -> list[NamelessRun]:
    """Returns the old drafts of a name, and with `includes_deleted` the deleted runs that had it. Changes nothing.

    Raises:
        LogCorruptError: the name's objects can't be read, so nothing is known to be a draft.
        StoreUnavailableError: the store can't be read.
    """
    runs = []
    for folder in await store.objects.folders(f"runs/{name}"):
        try:
            uid = check_id(folder, "run uid")
        except BadNameError:  # the folder of the names, or not one of ours
            continue
        run = await _nameless(store, name, uid, modified_before_unix_s, includes_deleted=includes_deleted)
        if run is not None:
            runs.append(run)
    return runs


async def delete_nameless(store: Store, run: NamelessRun, *, modified_before_unix_s: float) -> bool:
    """Deletes every object of the run and returns True, or False if it came into use meanwhile and stays whole.

    If this is cut off, the next collection finishes it.

    Raises:
        StoreUnavailableError: the store can't be used.
    """

    async def is_nameless() -> bool:
        now = await _nameless(store, run.name, run.uid, modified_before_unix_s, includes_deleted=run.was_named)
        return now is not None

    spec_name = entry_name(run_prefix(run.name, run.uid), 0)
    try:
        spec = await store.objects.get(spec_name)
    except ObjectMissingError:
        spec = None  # an earlier deletion was cut off
    if not await is_nameless():
        return False
    if spec is not None:
        await store.objects.delete([spec_name])
        left = await _objects(store, run.name, run.uid)
        if left:
            await store.objects.sync_parent(spec_name)  # a power cut must not bring it back without the rest
            if not await is_nameless():
                await store.objects.create(spec_name, spec)
                return False
    names = [info.name for info in await _objects(store, run.name, run.uid)]
    await store.objects.delete(sorted(names, key=lambda each: ("/log/" not in each, each)))
    return True


async def _nameless(
    store: Store, name: str, uid: str, modified_before_unix_s: float, *, includes_deleted: bool
) -> NamelessRun | None:
    """Returns the run if it may be deleted."""
    if not includes_deleted and uid in await store.name_history(name):
        return None  # its objects, which may be many, need not be listed
    # Listed before the name is read. A run that gets the name after that has written to its log, and is young.
    infos = await _objects(store, name, uid)
    if not infos or max(info.modified_at_unix_s for info in infos) >= modified_before_unix_s:
        return None
    history = await store.name_history(name)
    was_named = uid in history
    if was_named and (not includes_deleted or history[-1] == uid):
        return None
    return NamelessRun(name, uid, was_named, len(infos), sum(info.size_bytes for info in infos))


async def _objects(store: Store, name: str, uid: str) -> Sequence[ObjectInfo]:
    return [info async for info in store.objects.list(run_prefix(name, uid))]
