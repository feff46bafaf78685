"""`skerry log`: shows the entries of a run's log, as table rows for people, as JSON for scripts."""

from __future__ import annotations

import asyncio
import datetime as dt
import json
import sys
from collections.abc import Iterator
from typing import Any, Final

import click
import msgspec
from rich.table import Table

from skerry.cli.console import as_json, console
from skerry.runtime.clock import SystemClock
from skerry.runtime.options import Count
from skerry_syncer.store.errors import LogCorruptError
from skerry_syncer.store.log.entries import AcceptedItem, Entry, Fate, Item, item_to_json
from skerry_syncer.store.log.fold import apply_entry
from skerry_syncer.store.log.state import DeltaState, Outcome, RunState
from skerry_syncer.store.maintenance.options import opened_run, run_options, warn_of_damage

_FOLLOW_PAUSE_S: Final = 1.0
_SHORT: Final = 8  # digits of a 32-digit id that are shown to people
_SHORTENED: Final = frozenset({"delta", "request_id", "session"})
_HIDDEN: Final = frozenset({"kind", "base_digest", "digest", "last_step", "name", "parts", "squared_norms"})  # in rows


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
    columns = ("position", "time (UTC)", "writer", "kind", "facts", "effect")

    async def show() -> bool:
        async with opened_run(store_url, run, uid) as opened:
            run_log = opened.log
            first = max(start, run_log.state.position - last + 1) if last else start
            state, failure = RunState(run_log.spec), None
            table = Table(*columns, box=None, header_style="dim", pad_edge=False)
            while True:
                try:
                    async for entry, data in run_log.entries(state.position + 1, stop):
                        outcomes = apply_entry(state, entry, data)
                        if entry.position < first:
                            continue
                        if is_json:
                            click.echo(json.dumps(entry_json(entry, outcomes, state)))
                        else:
                            for row in entry_rows(entry, outcomes):
                                table.add_row(*row)
                except LogCorruptError as error:
                    failure = error
                if table.row_count:
                    console().print(table)
                    table = Table(*columns, box=None, show_header=False, pad_edge=False)
                if failure or not follow or state.position + 1 == stop:
                    return warn_of_damage(failure, state.position)
                await SystemClock().sleep(_FOLLOW_PAUSE_S)

    sys.exit(asyncio.run(show()))


def entry_rows(entry: Entry, outcomes: tuple[Outcome, ...]) -> Iterator[tuple[str, str, str, str, str, str]]:
    """Yields one row an item: position, time, writer, kind, facts, effect."""
    time = dt.datetime.fromtimestamp(entry.written_at_unix_s, dt.UTC).strftime("%Y-%m-%d %H:%M:%S")
    for outcome in outcomes:
        facts, effect = facts_text(outcome.item), effect_text(outcome)
        yield str(entry.position), time, entry.writer, outcome.item.kind, facts, effect


def entry_json(entry: Entry, outcomes: tuple[Outcome, ...], state: RunState) -> dict[str, Any]:
    """Returns an entry, and what the fold decided by it, as JSON values; `state` is the fold's after this entry.

    Each item says whether it was admitted, and else why not. `fates` has every delta that the entry accepted or
    decided, with its fate after the entry. So the last line that names a delta has its fate, and no reader has to fold.
    Of session ids, which let others push in a learner's name, it has the first digits.
    """
    deltas: dict[str, DeltaState] = {}
    for outcome in outcomes:
        if isinstance(outcome.item, AcceptedItem) and outcome.rejection is None:
            deltas[outcome.item.delta] = state.deltas[outcome.item.delta]
        deltas |= {delta.item.delta: delta for delta in outcome.decided}
    return msgspec.structs.asdict(entry) | {
        "items": [_outcome_json(outcome) for outcome in outcomes],
        "fates": [_fate_json(delta) for delta in deltas.values()],
    }


def _outcome_json(outcome: Outcome) -> dict[str, Any]:
    values, rejection = item_to_json(outcome.item), outcome.rejection
    if "session" in values:
        values["session"] = values["session"][:_SHORT]
    return values | {
        "is_admitted": rejection is None,
        "rejection": None if rejection is None else rejection.reason,
        "rejection_detail": None if rejection is None else rejection.detail,
    }


def _fate_json(delta: DeltaState) -> dict[str, Any]:
    return {
        "delta": delta.item.delta,
        "fragment": delta.item.fragment,
        "learner": delta.item.learner,
        "fate": delta.fate,
        "version": delta.version if delta.fate is Fate.MERGED else None,
        "reason": delta.reason,
    }


def facts_text(item: Item) -> str:
    """Returns an item's fields in one line: the first digits of ids, the lengths of lists, no objects."""
    facts = []
    for name, value in item_to_json(item).items():
        if name == "metrics":
            facts += [f"{metric}={'not finite' if number is None else number}" for metric, number in value.items()]
        elif name in _SHORTENED:
            facts.append(f"{name}={value[:_SHORT]}")
        elif name not in _HIDDEN and not isinstance(value, dict):
            facts.append(f"{name}={len(value) if isinstance(value, tuple) else value}")
    return ", ".join(facts)


def effect_text(outcome: Outcome) -> str:
    """Returns why an item was rejected, or which fates it decided, of whose deltas and why; else nothing."""
    if outcome.rejection is not None:
        return f"rejected: {outcome.rejection.reason}"
    learners: dict[tuple[str, str], list[str]] = {}
    for delta in outcome.decided:
        learners.setdefault((delta.fate, delta.reason), []).append(delta.item.learner)
    return ", ".join(
        f"{len(names)} {fate} of {', '.join(sorted(set(names)))}{reason and f': {reason}'}"
        for (fate, reason), names in sorted(learners.items())
    )
