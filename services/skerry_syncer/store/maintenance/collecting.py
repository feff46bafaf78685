"""`skerry gc`: deletes what no kept version of a run, or of any run, needs."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import click

from skerry.cli.console import as_json, shown_progress
from skerry.runtime.clock import SystemClock
from skerry.runtime.identifiers import SystemEntropy
from skerry.runtime.options import Count
from skerry_syncer.store.maintenance.options import (
    DURATION,
    opened_store,
    resolved,
    store_and_run_options,
    warn_of_damage,
)
from skerry_syncer.store.objects.put_if_absent import store_unix_s
from skerry_syncer.store.store import Store


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
@click.option("--drop-quarantined", is_flag=True, help="Also delete quarantined deltas.")
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
    drop_quarantined: bool,
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
    from skerry_syncer.store.log.retention import Retention
    from skerry_syncer.store.maintenance.collect import CollectionPlan, collect, plan_collection
    from skerry_syncer.store.maintenance.drafts import NamelessRun, delete_nameless, nameless_runs

    if is_all == (run is not None) or (is_all and uid is not None):
        raise click.UsageError("give either a run or --all")

    async def sweep_nameless(store: Store, run: str, now: float) -> list[NamelessRun]:
        oldest = now - litter_age
        found = await nameless_runs(store, run, modified_before_unix_s=oldest, includes_deleted=deleted_runs)
        chosen = [one for one in found if uid in (None, one.uid)]
        if not yes:
            return chosen
        return [one for one in chosen if await delete_nameless(store, one, modified_before_unix_s=oldest)]

    async def sweep(store: Store, run: str, now: float) -> tuple[CollectionPlan, bool]:
        open_run = store.open_run if yes else store.read_run
        run_log = (await open_run(run, uid or await resolved(store, run))).log
        policy = run_log.state.policy
        retention = Retention(
            keep_versions or policy.kept_version_count,
            policy.kept_hours if keep_since is None else keep_since / 3600,
            policy.kept_day_count,
            litter_age,
            keeps_quarantined=not drop_quarantined,
        )
        if not yes:
            return await plan_collection(run_log, retention, now_unix_s=now), warn_of_damage(run_log)
        with shown_progress("deleting") as progress:
            return await collect(run_log, retention, now_unix_s=now, progress=progress), False

    async def sweep_all() -> bool:
        is_any_cut = False
        async with opened_store(store_url, writes=yes) as (store, _):
            # A dry run writes nothing, so it can't ask the store for its time.
            now = await store_unix_s(store.objects, SystemEntropy()) if yes else SystemClock().unix_s()
            for name in await store.objects.folders("runs") if run is None else [run]:
                nameless = await sweep_nameless(store, name, now)
                plan, is_cut = CollectionPlan((), 0, 0), False
                if not (nameless or is_all) or (uid is None and not await _is_free(store, name)):
                    plan, is_cut = await sweep(store, name, now)
                if is_all and not is_json:
                    click.echo(f"{name}:")
                _show_collection(name, plan, nameless, is_dry=not yes, is_json=is_json)
                is_any_cut |= is_cut
        return is_any_cut

    sys.exit(asyncio.run(sweep_all()))


async def _is_free(store: Store, run: str) -> bool:
    history = await store.name_history(run)
    return not history or history[-1] is None


def _show_collection(run: str, plan: Any, nameless: list[Any], *, is_dry: bool, is_json: bool) -> None:
    by_reason: dict[str, tuple[int, int]] = {}
    for victim in plan.victims:
        count, size = by_reason.get(victim.why, (0, 0))
        by_reason[victim.why] = (count + 1, size + victim.size_bytes)
    if is_json:
        values = {
            "run": run,
            "is_dry_run": is_dry,
            "objects": len(plan.victims),
            "size_bytes": plan.size_bytes,
            "kept_objects": plan.kept_count,
            "kept_bytes": plan.kept_bytes,
            "names": [victim.name for victim in plan.victims],
            "runs": [
                {"uid": one.uid, "kind": _kind(one), "objects": one.object_count, "size_bytes": one.size_bytes}
                for one in nameless
            ],
        }
        click.echo(json.dumps(values))
        return
    verb = "would delete" if is_dry else "deleted"
    click.echo(f"{verb} {len(plan.victims)} objects, {plan.size_bytes} bytes")
    for why, (count, size) in sorted(by_reason.items()):
        click.echo(f"  {why}: {count} objects, {size} bytes")
    for one in nameless:
        click.echo(f"{verb} {_kind(one)} {one.uid}: {one.object_count} objects, {one.size_bytes} bytes")
    click.echo(f"kept {plan.kept_count} objects, {plan.kept_bytes} bytes")
    if is_dry and (plan.victims or nameless):
        click.echo("nothing was deleted; repeat the command with --yes to delete")


def _kind(run: Any) -> str:
    return "deleted run" if run.was_named else "draft"
