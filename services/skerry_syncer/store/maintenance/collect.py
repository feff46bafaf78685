"""Deletes objects that no kept version needs, and litter that no entry names.

A log entry condemns names before they are deleted. A writer that was about to name one of them learns this from the
fold and writes its blobs again. A crash between the two leaves condemned objects, which the next collection deletes.
Every replica of a run collects as the run's policy says, and any number of them may do so at the same time; `skerry gc`
is for people.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from skerry_syncer.store.log.entries import CollectedItem
from skerry_syncer.store.log.retention import Retention, kept_names, named_refs
from skerry_syncer.store.log.run_log import RunLog
from skerry_syncer.store.log.state import FragmentState
from skerry_syncer.store.objects.local import TEMPORARY

# Names in one entry, of about 150 bytes each: far below the size at which groups are split.
_NAMES_AN_ENTRY: Final = 1000
_BLOB_FOLDERS: Final = ("deltas", "rollbacks", "snapshots", "updates")
# How often a plan is made anew because the log moved on.
_ATTEMPTS: Final = 4


class Why(StrEnum):
    """Why an object may be deleted."""

    UNNEEDED = "unneeded"  # the log names it, and no kept version needs it
    LITTER = "litter"  # no admitted entry names it, and it is old
    CONDEMNED = "condemned"  # an earlier collection condemned it and was cut off
    TEMPORARY = "temporary"  # a write to a folder store that was cut off long ago


@dataclass(frozen=True)
class Victim:
    """An object that may be deleted; `name` is relative to the run, or to the store for temporary files."""

    name: str
    size_bytes: int
    why: Why


@dataclass(frozen=True)
class CollectionPlan:
    """What a collection would delete."""

    victims: tuple[Victim, ...]
    kept_count: int
    kept_bytes: int

    @property
    def size_bytes(self) -> int:
        """Bytes that would be deleted."""
        return sum(victim.size_bytes for victim in self.victims)


async def plan_collection(log: RunLog, retention: Retention, *, now_unix_s: float) -> CollectionPlan:
    """Returns what may be deleted, by the log's end and a listing of the run's objects. Changes nothing.

    `now_unix_s` is by the clock that dates the objects: `store_unix_s`.

    Of a damaged log, the good entries count.

    Raises:
        StoreUnavailableError: the store can't be read.
    """
    # The objects are listed before the log is read, so that objects written meanwhile are not looked at.
    found = [
        (info.name.removeprefix(f"{log.prefix}/"), info)
        for folder in _BLOB_FOLDERS
        async for info in log.objects.list(f"{log.prefix}/{folder}")
    ]
    if log.failure is None:
        await log.tail()
    state = log.state
    named = {ref.name for ref in named_refs(state)}
    kept = kept_names(state, retention)
    oldest_litter = now_unix_s - retention.litter_age_s
    victims = []
    for name, info in found:
        if name in state.condemned:
            victims.append(Victim(name, info.size_bytes, Why.CONDEMNED))
        elif name in named:
            if name not in kept:
                victims.append(Victim(name, info.size_bytes, Why.UNNEEDED))
        elif info.modified_at_unix_s < oldest_litter and log.failure is None:  # else a later entry may name it
            victims.append(Victim(name, info.size_bytes, Why.LITTER))
    gone = {victim.name for victim in victims}
    sizes = [info.size_bytes for name, info in found if name not in gone]
    victims += [
        Victim(info.name, info.size_bytes, Why.TEMPORARY)
        async for info in log.objects.list(TEMPORARY)
        if info.modified_at_unix_s < oldest_litter
    ]
    return CollectionPlan(tuple(sorted(victims, key=lambda victim: victim.name)), len(sizes), sum(sizes))


async def collect(
    log: RunLog,
    retention: Retention,
    *,
    now_unix_s: float,
    only: Container[Why] = frozenset(Why),
    progress: Callable[[int, int], None] | None = None,
) -> CollectionPlan:
    """Condemns and deletes objects, and returns which; calls `progress` with (objects deleted, in all).

    Objects that may go for other reasons than those in `only` stay.

    Raises:
        StoreUnavailableError: the store can't be used; everything deleted by then was condemned before.
    """
    went: list[Victim] = []
    for _ in range(_ATTEMPTS):
        plan = await plan_collection(log, retention, now_unix_s=now_unix_s)
        victims = [victim for victim in plan.victims if victim.why in only]
        total = len(went) + len(victims)
        is_outrun = False
        for start in range(0, len(victims), _NAMES_AN_ENTRY):
            batch = victims[start : start + _NAMES_AN_ENTRY]
            if not await _condemn(log, batch):
                is_outrun = True  # the log moved on, and an object of the batch is needed now
                continue
            await log.objects.delete([_path(log, victim) for victim in batch])
            went += batch
            if progress is not None:
                progress(len(went), total)
        if not is_outrun:
            break
    return CollectionPlan(tuple(went), plan.kept_count, plan.kept_bytes)


def versions_since(fragment: FragmentState, position: int) -> set[int]:
    """Returns the versions that were a fragment's newest at or after log position `position`."""
    ordered = sorted(fragment.versions.values(), key=lambda version: version.version)
    before = [version for version in ordered if version.position < position]
    after = [version for version in ordered if version.position >= position]
    return {version.version for version in (*before[-1:], *after)}


async def position_at(log: RunLog, age_s: float) -> int:
    """Returns the first log position that was written when the run had been served for so long (`RunLog.age_s`)."""
    low, high = 1, log.state.position + 1
    while low < high:
        middle = (low + high) // 2
        async for entry, _ in log.entries(middle, middle + 1):
            if entry.age_s < age_s:
                low = middle + 1
            else:
                high = middle
    return low


async def _condemn(log: RunLog, victims: Iterable[Victim]) -> bool:
    names = tuple(victim.name for victim in victims if victim.why in (Why.UNNEEDED, Why.LITTER))
    if not names:
        return True
    (outcome,) = await log.append([CollectedItem(names)])
    return outcome.rejection is None


def _path(log: RunLog, victim: Victim) -> str:
    return victim.name if victim.why is Why.TEMPORARY else f"{log.prefix}/{victim.name}"
