"""`skerry log`, `export`, `verify` and `gc`: the operator's commands, which need a store but no syncer."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, TypeVar

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from skerry.runtime.clock import SystemClock
from skerry.runtime.identifiers import SystemEntropy
from skerry.runtime.workers import ThreadWorkers, Workers
from skerry.store.errors import RunNotFoundError
from skerry.store.log.fold import apply_entry
from skerry.store.log.run_log import RunLog
from skerry.store.log.state import RunState
from skerry.store.objects.opening import open_objects
from skerry.store.operator.log_lines import entry_json, entry_lines
from skerry.store.store import Store

_WIDE: Final = 160  # columns of a pipe or a file
_UNITS_S: Final = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}

Function = TypeVar("Function", bound=Callable[..., Any])


def seconds(_context: click.Context, _parameter: click.Parameter, value: str | None) -> float | None:
    """Returns the seconds of a duration that a person wrote: 90s, 15m, 12h, 7d, 2w."""
    if value is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", value)
    if match is None:
        raise click.BadParameter(f"{value!r} is not a duration; write a number and s, m, h, d or w, as in 12h")
    return float(match[1]) * _UNITS_S[match[2]]


def run_options(function: Function) -> Function:
    """Gives a command the options that say which run of which store."""
    for option in (
        click.option(
            "--uid",
            help="The run's uid, for a draft or a deleted run.  [default: the uid of the run that has the name]",
        ),
        click.option("--run", "run_name", required=True, help="The run's name."),
        click.option(
            "--store",
            "store_url",
            default="file://./skerry-data",  # where `skerry serve` keeps it
            show_default=True,
            help="Where the run is stored: file://folder, as in file:///var/lib/skerry, or s3://bucket/prefix.",
        ),
    ):
        function = option(function)
    return function


def json_option(function: Function) -> Function:
    """Gives a command the flag `--json`."""
    return click.option("--json", "is_json", is_flag=True, help="Print JSON, for scripts.")(function)


@asynccontextmanager
async def opened_store(store_url: str) -> AsyncIterator[tuple[Store, Workers]]:
    """Opens a store, and closes everything after."""
    workers = ThreadWorkers(2)
    objects = open_objects(store_url, create=False)
    store = Store(
        objects, clock=SystemClock(), entropy=SystemEntropy(), workers=workers, writer="command", keeps_history=True
    )
    try:
        yield store, workers
    finally:
        await store.close()
        workers.close()


@asynccontextmanager
async def opened_log(store_url: str, run_name: str, uid: str | None) -> AsyncIterator[tuple[RunLog, Workers]]:
    """Opens a run's log, folded to its end, and closes everything after."""
    async with opened_store(store_url) as (store, workers):
        yield await store.open_log(run_name, uid or await _resolve(store, run_name)), workers


async def _resolve(store: Store, run_name: str) -> str:
    try:
        return await store.resolve(run_name)
    except RunNotFoundError as error:
        names = [name for name, _ in await store.list_runs()]
        raise RunNotFoundError(f"{error}, runs={names}") from None


@contextmanager
def shown_progress(what: str, *, is_hidden: bool) -> Iterator[Callable[[int, int], None]]:
    """Shows a progress bar if standard error is a terminal; yields a function to call with (done, in all)."""
    console = Console(stderr=True)
    columns = (TextColumn(what), BarColumn(), TextColumn("{task.completed} of {task.total}"), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=is_hidden or not console.is_terminal, transient=True) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


@click.command(
    "log",
    epilog="""\b
Examples:
  skerry log --store file:///var/lib/skerry --run demo --last 20
  skerry log --store s3://bucket/skerry --run demo --json --follow | jq '.fates[]'
""",
)
@run_options
@click.option("--start", type=click.IntRange(min=1), default=1, show_default=True, help="First position to show.")
@click.option("--stop", type=click.IntRange(min=1), help="Position to stop before.  [default: the log's end]")
@click.option("--last", type=click.IntRange(min=1), help="Show only this many entries, the newest.")
@click.option("--follow", is_flag=True, help="Keep showing new entries until interrupted.")
@json_option
def log(
    *,
    store_url: str,
    run_name: str,
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
    """
    columns = ("position", "time (UTC)", "writer", "kind", "what", "effect")
    console = Console() if sys.stdout.isatty() else Console(width=_WIDE)

    async def show() -> None:
        async with opened_log(store_url, run_name, uid) as (run_log, _):
            first = max(start, run_log.state.position - last + 1) if last else start
            state = RunState(run_log.spec)
            table = Table(*columns, box=None, header_style="dim", pad_edge=False)
            while True:
                async for entry, data in run_log.entries(state.position + 1, stop):
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
                if not follow or (stop is not None and state.position + 1 >= stop):
                    return
                await SystemClock().sleep(1.0)

    asyncio.run(show())


@click.command(
    "export",
    epilog="""\b
Examples:
  skerry export --store file:///var/lib/skerry --run demo --out model.safetensors
  skerry export --store s3://bucket/skerry --run demo --position 4711 --dtype float32 --out then.safetensors
""",
)
@run_options
@click.option(
    "--out",
    "out_path",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    required=True,
    help="The file to write.",
)
@click.option(
    "--position",
    type=click.IntRange(min=0),
    help="Position in the log whose weights to write.  [default: the log's end]",
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
    run_name: str,
    uid: str | None,
    out_path: Path,
    position: int | None,
    dtype: str,
    is_json: bool,
) -> None:
    """Write a run's weights at any log position as one safetensors file."""
    from skerry.store.operator.export import ExportDtype, export_checkpoint

    chosen: ExportDtype = "float32" if dtype == "float32" else "original"

    async def write() -> dict[str, Any]:
        async with opened_log(store_url, run_name, uid) as (run_log, workers):
            at = run_log.state.position if position is None else position
            with shown_progress("exporting", is_hidden=is_json) as progress:
                versions = await export_checkpoint(
                    run_log, out_path, position=at, dtype=chosen, workers=workers, progress=progress
                )
            return {"path": str(out_path), "position": at, "versions": versions}

    done = asyncio.run(write())
    if is_json:
        click.echo(json.dumps(done))
    else:
        versions = ", ".join(f"{fragment} {version}" for fragment, version in done["versions"].items())
        click.echo(f"wrote {out_path}: position {done['position']}, versions {versions}")


@click.command(
    "verify",
    epilog="""\b
Examples:
  skerry verify --store file:///var/lib/skerry --run demo
  skerry verify --store s3://bucket/skerry --run demo --json
""",
)
@run_options
@click.option(
    "--scratch",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder for temporary files of six times the largest fragment.  [default: the system's]",
)
@json_option
def verify(*, store_url: str, run_name: str, uid: str | None, scratch: Path | None, is_json: bool) -> None:
    """Replay a run from its log and objects, and check that every version is the result of its deltas.

    Exits with status 1 if a check fails.
    """
    from skerry.store.operator.verify import VerifyReport, verify_run
    from skerry.store.versions.scratch import Scratch

    async def check() -> VerifyReport:
        with TemporaryDirectory(dir=scratch, prefix="skerry-verify-") as folder:
            async with opened_log(store_url, run_name, uid) as (run_log, workers):
                with shown_progress("verifying", is_hidden=is_json) as progress:
                    return await verify_run(run_log, workers=workers, scratch=Scratch(Path(folder)), progress=progress)

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
    "gc",
    epilog="""\b
Examples:
  skerry gc --store file:///var/lib/skerry --run demo
  skerry gc --store s3://bucket/skerry --run demo --keep-versions 4 --keep-since 7d --yes
""",
)
@run_options
@click.option(
    "--keep-versions",
    type=click.IntRange(min=1),
    default=8,
    show_default=True,
    help="How many of the newest versions of each fragment to keep, with weights, outer state and deltas.",
)
@click.option(
    "--keep-since", callback=seconds, help="Also keep versions that were the newest within this time, as in 7d."
)
@click.option(
    "--litter-age",
    callback=seconds,
    default="24h",
    show_default=True,
    help="Delete objects that no log entry names, and drafts that never got the name, once they are this old. It must "
    "be longer than any push or creation takes.",
)
@click.option(
    "--deleted-runs", is_flag=True, help="Also delete whole runs of that age that had the name and were deleted."
)
@click.option("--drop-quarantined", is_flag=True, help="Also delete quarantined deltas.")
@click.option("--yes", is_flag=True, help="Delete. Without it, only print what would be deleted.")
@json_option
def gc(
    *,
    store_url: str,
    run_name: str,
    uid: str | None,
    keep_versions: int,
    keep_since: float | None,
    litter_age: float,
    drop_quarantined: bool,
    deleted_runs: bool,
    yes: bool,
    is_json: bool,
) -> None:
    """Delete objects that no kept version of a run needs, litter, and old drafts. A dry run unless --yes is given.

    A draft is a run that was created under the name and never got it; each has a full copy of the weights. With --uid
    only that run is looked at.
    """
    from skerry.store.operator.collect import CollectionPlan, Retention, collect, plan_collection, position_at
    from skerry.store.operator.drafts import NamelessRun, delete_nameless, nameless_runs

    now = SystemClock().unix_s()
    oldest = now - litter_age

    async def sweep_nameless(store: Store) -> list[NamelessRun]:
        found = await nameless_runs(store, run_name, modified_before_unix_s=oldest, includes_deleted=deleted_runs)
        chosen = [one for one in found if uid in (None, one.uid)]
        if not yes:
            return chosen
        return [one for one in chosen if await delete_nameless(store, one, modified_before_unix_s=oldest)]

    async def sweep(store: Store) -> CollectionPlan:
        run_log = await store.open_log(run_name, uid or await _resolve(store, run_name))
        since = None if keep_since is None else await position_at(run_log, now - keep_since)
        retention = Retention(keep_versions, since, litter_age, keeps_quarantined=not drop_quarantined)
        if not yes:
            return await plan_collection(run_log, retention, now_unix_s=now)
        with shown_progress("deleting", is_hidden=is_json) as progress:
            return await collect(run_log, retention, now_unix_s=now, progress=progress)

    async def sweep_all() -> tuple[CollectionPlan, list[NamelessRun]]:
        async with opened_store(store_url) as (store, _):
            nameless = await sweep_nameless(store)
            if nameless and (uid is not None or await _is_free(store, run_name)):
                return CollectionPlan((), 0, 0), nameless
            return await sweep(store), nameless

    plan, nameless = asyncio.run(sweep_all())
    _show_collection(plan, nameless, is_dry=not yes, is_json=is_json)


async def _is_free(store: Store, run_name: str) -> bool:
    history = await store.name_history(run_name)
    return not history or history[-1] is None


def _show_collection(plan: Any, nameless: list[Any], *, is_dry: bool, is_json: bool) -> None:
    by_reason: dict[str, tuple[int, int]] = {}
    for victim in plan.victims:
        count, size = by_reason.get(victim.why, (0, 0))
        by_reason[victim.why] = (count + 1, size + victim.size_bytes)
    if is_json:
        values = {
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
