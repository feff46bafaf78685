"""`skerry log`: what a run's log says."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Final

import click
from rich.console import Console
from rich.table import Table

from skerry.cli.console import as_json
from skerry.runtime.clock import SystemClock
from skerry.runtime.options import Count
from skerry_syncer.store.log.fold import apply_entry
from skerry_syncer.store.log.run_log import RunLog
from skerry_syncer.store.log.state import RunState
from skerry_syncer.store.maintenance.log_lines import entry_json, entry_lines
from skerry_syncer.store.maintenance.options import opened_run, run_options, warn_of_damage

_WIDE: Final = 160  # columns of a pipe or a file
_FOLLOW_PAUSE_S: Final = 1.0


@click.command(
    "log",
    epilog="""\b
Examples:
  skerry log demo --store file:///var/lib/skerry --last 20
  skerry log demo --store s3://bucket/skerry --json --follow | jq '.fates[]'
""",
)
@run_options
@click.option("--start", type=Count(1), default=1, show_default=True, help="First position to show.")
@click.option("--stop", type=Count(1), help="Position to stop before.  [default: the log's end]")
@click.option("--last", type=Count(1), help="Show only this many entries, the newest.")
@click.option("--follow", is_flag=True, help="Keep showing new entries until interrupted.")
@as_json
def log(
    *,
    store_url: str,
    run: str,
    uid: str | None,
    start: int,
    stop: int | None,
    last: int | None,
    follow: bool,
    is_json: bool,
) -> None:
    """Show a run's log: every decision, who wrote it, and what it did.

    With --json each line is one entry. Every item says whether it took effect, and if not, why. `fates` lists the
    deltas that the entry accepted or decided, with their fate, version and reason after it, so the last line that
    lists a delta has its fate.

    Where an entry is damaged, those before it are shown, and the exit status is 1.
    """
    columns = ("position", "time (UTC)", "writer", "kind", "what", "effect")
    console = Console() if sys.stdout.isatty() else Console(width=_WIDE)

    async def show() -> bool:
        async with opened_run(store_url, run, uid) as (opened, _):
            run_log = opened.log
            end = _end(run_log, stop)
            first = max(start, run_log.state.position - last + 1) if last else start
            state = RunState(run_log.spec)
            table = Table(*columns, box=None, header_style="dim", pad_edge=False)
            while True:
                async for entry, data in run_log.entries(state.position + 1, end):
                    outcomes = apply_entry(state, entry, data)
                    if entry.position < first:
                        continue
                    if is_json:
                        click.echo(json.dumps(entry_json(entry, outcomes, state)))
                    else:
                        for row in entry_lines(entry, outcomes):
                            table.add_row(*row)
                if table.row_count:
                    console.print(table)
                    table = Table(*columns, box=None, show_header=False, pad_edge=False)
                if not follow or (end is not None and state.position + 1 >= end):
                    return end != stop and warn_of_damage(run_log)
                await SystemClock().sleep(_FOLLOW_PAUSE_S)

    sys.exit(asyncio.run(show()))


def _end(run_log: RunLog, stop: int | None) -> int | None:
    """Returns the position to stop before: `stop`, or that of a damaged entry before it; None at the log's end."""
    if run_log.failure is None:
        return stop
    damaged = run_log.state.position + 1
    return damaged if stop is None else min(stop, damaged)
