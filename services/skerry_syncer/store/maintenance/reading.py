"""`skerry log` and `skerry export`: what a run's log says, and the weights that it leads to."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any, Final

import click
from rich.console import Console
from rich.table import Table

from skerry.runtime.clock import SystemClock
from skerry.runtime.options import INPUT_FILE, OUTPUT_FILE, Count
from skerry_syncer.store.errors import ObjectMissingError
from skerry_syncer.store.log.fold import apply_entry
from skerry_syncer.store.log.run_log import RunLog
from skerry_syncer.store.log.state import RunState
from skerry_syncer.store.maintenance.log_lines import entry_json, entry_lines
from skerry_syncer.store.maintenance.options import json_option, opened_log, run_options, shown_progress, warn_of_damage

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
@json_option
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
        async with opened_log(store_url, run, uid) as (run_log, _):
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


@click.command(
    "export",
    epilog="""\b
Examples:
  skerry export demo --store file:///var/lib/skerry --out model.safetensors
  skerry export demo --store s3://bucket/skerry --position 4711 --dtype float32 --out then.safetensors
  skerry export lora --store s3://bucket/skerry --base gemma/model.safetensors --out tuned.safetensors
""",
)
@run_options
@click.option(
    "--out",
    "out_path",
    type=OUTPUT_FILE,
    required=True,
    help="The file to write.",
)
@click.option(
    "--position",
    type=Count(),
    help="Position in the log whose weights to write.  [default: the log's end]",
)
@click.option(
    "--base",
    "base_paths",
    type=INPUT_FILE,
    multiple=True,
    help="A safetensors file with what the run does not train: frozen parameters, buffers. May be repeated.",
)
@click.option(
    "--dtype",
    type=click.Choice(["original", "float32"]),
    default="original",
    show_default=True,
    help="Element types: the learners' own, or float32, which is exact.",
)
@json_option
def export(
    *,
    store_url: str,
    run: str,
    uid: str | None,
    out_path: Path,
    position: int | None,
    base_paths: tuple[Path, ...],
    dtype: str,
    is_json: bool,
    is_adapter: bool = False,
    is_whole: bool = False,
) -> None:
    """Write a run's weights at any log position as one safetensors file.

    The run has only the tensors that it trains. A model with frozen parameters or buffers is complete with --base: the
    files that learners loaded it from. What is not in the file, and what differs from the run's record, is said on
    standard error and, with --json, in `missing` and `other`.

    Where the log is damaged, its last good entry is the default position, and the exit status is 1.
    """
    from skerry.wire.base_model import BaseModel
    from skerry_syncer.store.maintenance.export import ExportDtype, export_checkpoint

    chosen: ExportDtype = "float32" if dtype == "float32" else "original"

    async def write() -> tuple[dict[str, Any], bool]:
        async with opened_log(store_url, run, uid) as (run_log, workers):
            at = run_log.state.position if position is None else position
            base = BaseModel(run_log.spec.untrained, run_log.spec.dtypes, base_paths)
            if is_whole and base.missing:
                raise click.UsageError(next(base.remarks()))
            with shown_progress("exporting", is_hidden=is_json) as progress:
                while True:
                    try:
                        versions = await export_checkpoint(
                            run_log, out_path, position=at, dtype=chosen, workers=workers, base=base, progress=progress
                        )
                        break
                    except ObjectMissingError:
                        if position is not None or at == run_log.state.position:
                            raise
                        at = run_log.state.position  # a collection took the older weights while they were read
            is_cut = position is None and warn_of_damage(run_log)
            lacks: dict[str, Any] = {}
            if not is_adapter:
                for remark in base.remarks():
                    click.echo(f"warning: {remark}", err=True)
                lacks = {"missing": base.missing, "other": base.other}
            return {"path": str(out_path), "position": at, "versions": versions, **lacks}, is_cut

    try:
        done, is_cut = asyncio.run(write())
    except OSError as error:
        raise click.BadParameter(f"can't be written: {error.strerror}. path={out_path}", param_hint="--out") from error
    if is_json:
        click.echo(json.dumps(done))
    else:
        versions = ", ".join(f"{fragment} {version}" for fragment, version in done["versions"].items())
        click.echo(f"wrote {out_path}: position {done['position']}, versions {versions}")
    sys.exit(is_cut)
