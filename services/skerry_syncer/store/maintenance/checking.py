"""`skerry verify` and `skerry repair`: whether a run is whole, and what can be done where it is not."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import click

from skerry.runtime.identifiers import SystemEntropy
from skerry.runtime.options import EXISTING_FOLDER
from skerry_syncer.store.log.run_log import RunLog
from skerry_syncer.store.maintenance.damage import Damage, Remedy
from skerry_syncer.store.maintenance.options import (
    POSITION_OR_DURATION,
    json_option,
    opened_log,
    opened_store,
    resolved,
    run_options,
    shown_progress,
    store_of,
)


@click.command(
    "verify",
    epilog="""\b
Examples:
  skerry verify demo --store file:///var/lib/skerry
  skerry verify demo --store s3://bucket/skerry --since 24h --json
""",
)
@run_options
@click.option(
    "--scratch",
    type=EXISTING_FOLDER,
    help="Folder for temporary files of six times the largest fragment.  [default: the system's]",
)
@click.option(
    "--since",
    type=POSITION_OR_DURATION,
    metavar="POSITION|DURATION",
    help="Check the versions that were the newest at or after a log position, or within a time before the log's end, "
    "as in 7d; begin with the snapshots before them.  [default: all versions]",
)
@json_option
def verify(
    *, store_url: str, run: str, uid: str | None, scratch: Path | None, since: float | None, is_json: bool
) -> None:
    """Replay a run from its log and objects, and check that every version is the result of its deltas.

    Exits with status 1 if a check fails. A damaged log is such a failure; its good entries are checked all the same.
    """
    from skerry_syncer.store.maintenance.collect import position_at
    from skerry_syncer.store.maintenance.verify import VerifyReport, verify_run
    from skerry_syncer.store.versions.scratch import Scratch

    async def check() -> VerifyReport:
        with TemporaryDirectory(dir=scratch, prefix="skerry-verify-") as folder:
            async with opened_log(store_url, run, uid) as (run_log, workers):
                first = since if isinstance(since, int) else 0
                if isinstance(since, float):
                    first = await position_at(run_log, run_log.state.age_s - since)
                with shown_progress("verifying", is_hidden=is_json) as progress:
                    return await verify_run(
                        run_log, workers=workers, scratch=Scratch(Path(folder)), since=first, progress=progress
                    )

    report = asyncio.run(check())
    if is_json:
        values = {
            "ok": report.ok,
            "versions_checked": report.versions_checked,
            "versions_replayed": report.versions_replayed,
            "problems": [str(problem) for problem in report.problems],
        }
        click.echo(json.dumps(values))
    else:
        for problem in report.problems:
            click.echo(f"problem: {problem}")
        verdict = "ok" if report.ok else f"{len(report.problems)} problems"
        checked = f"{report.versions_checked} versions checked, {report.versions_replayed} of them replayed"
        click.echo(f"{verdict}: {checked}")
    sys.exit(0 if report.ok else 1)


@click.command(
    "repair",
    epilog="""\b
Examples:
  skerry repair demo --store file:///var/lib/skerry
  skerry repair demo --store s3://bucket/skerry --yes
""",
)
@run_options
@click.option(
    "--scratch",
    type=EXISTING_FOLDER,
    help="Folder for temporary files of five times the largest fragment.  [default: the system's]",
)
@click.option(
    "--give-up",
    is_flag=True,
    help="Also let go what can't be mended and is not needed to go on: a damaged last log entry, with what was "
    "acknowledged by it, and lost objects of the past, which then count as collected.",
)
@click.option("--yes", is_flag=True, help="Mend. Without it, only print what is damaged and what would be done.")
@json_option
def repair(
    *, store_url: str, run: str, uid: str | None, scratch: Path | None, give_up: bool, yes: bool, is_json: bool
) -> None:
    """Find what is damaged in a run, and mend what can be mended. A dry run unless --yes is given.

    Lost snapshots and updates are made again. A delta whose parts are lost is quarantined while its round is not
    committed. A last log entry without an end is set aside. What replaces an object has the digest that the log names,
    and what was damaged is kept below damaged/ in the run's folder. Run one repair at a time.

    Exits with status 0 if nothing is damaged any more, else with 1.
    """
    from skerry_syncer.store.maintenance.repair import Repair
    from skerry_syncer.store.maintenance.repair_log import open_mended
    from skerry_syncer.store.versions.scratch import Scratch

    entropy = SystemEntropy()

    async def mend() -> list[Damage]:
        with TemporaryDirectory(dir=scratch, prefix="skerry-repair-") as folder:
            async with opened_store(store_url, writes=yes) as (store, workers):
                known_uid = uid or await resolved(store, run)

                async def open_log() -> RunLog:
                    return await store_of(store.objects, workers).read_log(run, known_uid)

                run_log, found = await open_mended(open_log, workers, entropy, acts=yes, gives_up=give_up)
                work = Repair(
                    run_log,
                    workers=workers,
                    scratch=Scratch(Path(folder)),
                    entropy=entropy,
                    may_append=all(damage.is_mended for damage in found),
                    acts=yes,
                    gives_up=give_up,
                )
                with shown_progress("checking", is_hidden=is_json) as progress:
                    return found + await work.run(progress)

    found = asyncio.run(mend())
    _show_damage(found, is_dry=not yes, is_json=is_json)
    sys.exit(any(not damage.is_mended for damage in found))


def _show_damage(found: list[Damage], *, is_dry: bool, is_json: bool) -> None:
    if is_json:
        values = {
            "is_dry_run": is_dry,
            "ok": all(damage.is_mended for damage in found),
            "damages": [dataclasses.asdict(damage) for damage in found],
        }
        click.echo(json.dumps(values))
        return
    for damage in found:
        click.echo(f"damaged: {damage}")
    mended = sum(damage.is_mended for damage in found)
    click.echo(f"{len(found)} objects are damaged, {mended} were mended" if found else "ok: nothing is damaged")
    if is_dry and any(damage.remedy is not Remedy.NONE for damage in found):
        click.echo("nothing was changed; repeat the command with --yes to mend")
