"""`skerry verify`: whether a run is whole."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import click

from skerry.cli.console import as_json, shown_progress
from skerry.runtime.options import EXISTING_FOLDER
from skerry_syncer.store.maintenance.options import (
    POSITION_OR_DURATION,
    opened_run,
    run_options,
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
@as_json
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
            async with opened_run(store_url, run, uid) as (opened, workers):
                first = since if isinstance(since, int) else 0
                if isinstance(since, float):
                    first = await position_at(opened.log, opened.state.age_s - since)
                with shown_progress("verifying") as progress:
                    return await verify_run(
                        opened, workers=workers, scratch=Scratch(Path(folder)), since=first, progress=progress
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
