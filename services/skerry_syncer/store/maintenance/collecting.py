"""`skerry gc`, and what every replica does by its run's policy: deletes objects that no kept version needs, and litter.

A log entry condemns names before they are deleted. A writer that was about to name one of them learns this from the
fold and writes its blobs again. A crash between the two leaves condemned objects, which the next collection deletes.
Any number of processes may collect at the same time.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import click

from skerry.cli.console import as_json, shown_progress
from skerry.runtime.clock import SystemClock
from skerry.runtime.identifiers import SystemEntropy
from skerry.runtime.options import Count
from skerry.wire.policy import Policy
from skerry_syncer.store.log.entries import CollectedItem
from skerry_syncer.store.log.retention import kept_names, named_refs
from skerry_syncer.store.log.run_log import RunLog
from skerry_syncer.store.maintenance.drafts import NamelessRun, delete_nameless, nameless_runs
from skerry_syncer.store.maintenance.options import (
    DURATION,
    opened_store,
    report,
    resolved,
    store_and_run_options,
    warn_of_damage,
)
from skerry_syncer.store.objects.interface import ObjectInfo
from skerry_syncer.store.objects.local import TEMPORARY
from skerry_syncer.store.objects.put_if_absent import store_unix_s
from skerry_syncer.store.store import Store

# Names in one entry, of about 150 bytes each: far below the size at which groups are split.
_NAMES_AN_ENTRY: Final = 1000
_BLOB_FOLDERS: Final = ("deltas", "snapshots", "updates")


@dataclass(frozen=True)
class CollectionPlan:
    """What a collection would delete, and how much it would leave."""

    victims: tuple[ObjectInfo, ...] = ()
    kept_count: int = 0
    kept_bytes: int = 0

    @property
    def size_bytes(self) -> int:
        """Bytes that would be deleted."""
        return sum(victim.size_bytes for victim in self.victims)


async def plan_collection(
    log: RunLog,
    policy: Policy,
    *,
    litter_before_unix_s: float,
) -> CollectionPlan:
    """Returns what may be deleted, by the log's end and a listing of the run's objects. Changes nothing.

    That is what no kept version takes, what an earlier collection condemned before it was cut off, and litter: what no
    entry names and what writes to a folder left, from before a time by the clock that dates the objects
    (`store_unix_s`). Of a damaged log, the good entries count.

    Raises:
        StoreUnavailableError: the store can't be read.
    """
    # The objects are listed before the log is read, so that objects written meanwhile are not looked at.
    infos = [info for folder in _BLOB_FOLDERS async for info in log.objects.list(f"{log.prefix}/{folder}")]
    if log.failure is None:
        await log.tail()
    named = {ref.name for ref in named_refs(log.state)}
    needed = kept_names(log.state, policy)
    victims: list[ObjectInfo] = []
    kept: list[ObjectInfo] = []
    for info in infos:
        name = _name_in_run(log, info)
        is_litter = (
            info.modified_at_unix_s < litter_before_unix_s and log.failure is None
        )  # else a later entry names it
        is_unneeded = name not in needed if name in named else is_litter
        (victims if is_unneeded or name in log.state.condemned else kept).append(info)
    victims += [info async for info in log.objects.list(TEMPORARY) if info.modified_at_unix_s < litter_before_unix_s]
    return CollectionPlan(tuple(sorted(victims)), len(kept), sum(info.size_bytes for info in kept))


async def collect(
    log: RunLog, plan: CollectionPlan, progress: Callable[[int, int], None] = lambda _done, _total: None
) -> CollectionPlan:
    """Condemns and deletes the victims of a plan, and returns what went.

    Calls `progress` with (objects deleted, in all).

    Raises:
        StoreUnavailableError: the store can't be used; everything deleted by then was condemned before.
    """
    gone: list[ObjectInfo] = []
    for start in range(0, len(plan.victims), _NAMES_AN_ENTRY):
        batch = plan.victims[start : start + _NAMES_AN_ENTRY]
        if await _condemn(log, batch):  # else the log moved on, and an object of the batch is needed now
            await log.objects.delete([victim.name for victim in batch])
            gone += batch
            progress(len(gone), len(plan.victims))
    return replace(plan, victims=tuple(gone))


async def _condemn(log: RunLog, victims: Sequence[ObjectInfo]) -> bool:
    """Returns whether the log says that these objects may be deleted; temporary files are not in it."""
    names = [_name_in_run(log, victim) for victim in victims if not victim.name.startswith(TEMPORARY)]
    uncondemned = tuple(name for name in names if name not in log.state.condemned)
    if not uncondemned:
        return True
    (outcome,) = await log.append([CollectedItem(uncondemned)])
    return outcome.rejection is None


def _name_in_run(log: RunLog, info: ObjectInfo) -> str:
    return info.name.removeprefix(f"{log.prefix}/")


@click.command(
    "gc",
    epilog="""\b
Examples:
  skerry gc demo --store file:///var/lib/skerry
  skerry gc --store s3://bucket/skerry --all --yes
  skerry gc demo --store s3://bucket/skerry --keep-versions 4 --keep-since 7d --yes
""",
)
@store_and_run_options(is_run_required=False)
@click.option("--all", "is_all", is_flag=True, help="Collect all runs of the store, instead of one.")
@click.option(
    "--keep-versions",
    type=Count(1, 2**31 - 1),
    help="How many of the newest versions of each fragment to keep, with weights, outer state and deltas.  "
    "[default: the run's kept_version_count]",
)
@click.option(
    "--keep-since",
    type=DURATION,
    help="Also keep the weights of versions that were the newest within this time before the run's newest, as in 7d.  "
    "[default: the run's kept_hours]",
)
@click.option(
    "--litter-age",
    type=DURATION,
    default="24h",
    show_default=True,
    help="Delete objects that no log entry names, and drafts that were never committed, once they are this old. It "
    "must be longer than any push or creation takes.",
)
@click.option(
    "--deleted-runs",
    is_flag=True,
    help="Also delete whole runs that were removed by `skerry runs delete`, once they are that old.",
)
@click.option("--yes", is_flag=True, help="Delete. Without it, only print what would be deleted.")
@as_json
def gc(
    *,
    store_url: str,
    run: str | None,
    is_all: bool,
    uid: str | None,
    keep_versions: int | None,
    keep_since: float | None,
    litter_age: float,
    deleted_runs: bool,
    yes: bool,
    is_json: bool,
) -> None:
    """Delete objects that no kept version of a run needs, litter, and old drafts. A dry run unless --yes is given.

    Syncers collect by themselves, by the run's policy. What is pinned stays, and so does the
    last version of each 24 hours of training, for as long as the policy says.

    A draft is a run that was created but never committed under its name; each has a full copy of the weights. With
    --uid only that run is looked at, with --all every run. Where a log is damaged, a dry run goes by its good entries
    and exits with status 1, and nothing is deleted.
    """
    if is_all == (run is not None) or (is_all and uid is not None):
        raise click.UsageError("give either a run or --all")

    async def collect_run(store: Store, name: str, before: float) -> tuple[CollectionPlan, bool]:
        run_uid = uid or await resolved(store, name)
        log = (await (store.open_run(name, run_uid) if yes else store.read_run(name, run_uid))).log
        policy = log.state.policy
        if keep_versions is not None:
            policy = replace(policy, kept_version_count=keep_versions)
        if keep_since is not None:
            policy = replace(policy, kept_hours=keep_since / 3600)
        plan = await plan_collection(log, policy, litter_before_unix_s=before)
        if not yes:
            return plan, warn_of_damage(log.failure, log.state.position)
        with shown_progress("deleting") as progress:
            return await collect(log, plan, progress), False

    async def collect_all() -> bool:
        is_any_damaged = False
        async with opened_store(store_url, writes=yes) as store:
            # A dry run writes nothing, so it can't ask the store for its time.
            now_unix_s = await store_unix_s(store.objects, SystemEntropy()) if yes else SystemClock().unix_s()
            before = now_unix_s - litter_age
            for name in await store.objects.folders("runs") if run is None else [run]:
                drafts = await nameless_runs(store, name, modified_before_unix_s=before, includes_deleted=deleted_runs)
                drafts = [draft for draft in drafts if uid in (None, draft.uid)]
                if yes:
                    drafts = [
                        each for each in drafts if await delete_nameless(store, each, modified_before_unix_s=before)
                    ]
                plan, is_damaged = CollectionPlan(), False
                if not (drafts or is_all) or (uid is None and await store.resolve(name)):
                    plan, is_damaged = await collect_run(store, name, before)
                is_any_damaged |= is_damaged
                if is_all and not is_json:
                    click.echo(f"{name}:")
                report(
                    _values(name, plan, drafts, is_dry=not yes), _lines(plan, drafts, is_dry=not yes), is_json=is_json
                )
        return is_any_damaged

    sys.exit(asyncio.run(collect_all()))


def _values(run: str, plan: CollectionPlan, nameless: Sequence[NamelessRun], *, is_dry: bool) -> dict[str, Any]:
    return {
        "run": run,
        "is_dry_run": is_dry,
        "objects": len(plan.victims),
        "size_bytes": plan.size_bytes,
        "kept_objects": plan.kept_count,
        "kept_bytes": plan.kept_bytes,
        "names": [victim.name.split("/", 3)[-1] for victim in plan.victims],
        "runs": [
            {"uid": each.uid, "kind": each.kind, "objects": each.object_count, "size_bytes": each.size_bytes}
            for each in nameless
        ],
    }


def _lines(plan: CollectionPlan, nameless: Sequence[NamelessRun], *, is_dry: bool) -> Iterator[str]:
    verb = "would delete" if is_dry else "deleted"
    yield f"{verb} {len(plan.victims)} objects, {plan.size_bytes} bytes"
    for each in nameless:
        yield f"{verb} {each.kind} {each.uid}: {each.object_count} objects, {each.size_bytes} bytes"
    yield f"kept {plan.kept_count} objects, {plan.kept_bytes} bytes"
    if is_dry and (plan.victims or nameless):
        yield "nothing was deleted; repeat the command with --yes to delete"
