"""`skerry log`: shows the entries of a run's log, as table rows for people, as JSON for scripts."""

from __future__ import annotations

import asyncio
import datetime as dt
import json
import sys
from collections.abc import Iterable, Iterator
from typing import Any, Final, assert_never

import click
from rich.table import Table

from skerry.cli.console import as_json, console
from skerry.runtime.clock import SystemClock
from skerry.runtime.options import Count
from skerry_syncer.store.log.entries import (
    AcceptedItem,
    CheckpointItem,
    ClosedItem,
    CollectedItem,
    CommittedItem,
    Decided,
    Entry,
    Fate,
    FateItem,
    Item,
    LeftItem,
    PolicyItem,
    RollbackItem,
    SessionItem,
    SnapshotItem,
    StatusItem,
    item_to_json,
)
from skerry_syncer.store.log.fold import apply_entry
from skerry_syncer.store.log.run_log import RunLog
from skerry_syncer.store.log.state import DeltaState, Outcome, RunState
from skerry_syncer.store.maintenance.options import opened_run, run_options, warn_of_damage

_FOLLOW_PAUSE_S: Final = 1.0
_SHORT: Final = 8  # digits of a 32-digit id that are shown to people


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
                    console().print(table)
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


def entry_lines(entry: Entry, outcomes: tuple[Outcome, ...]) -> Iterator[tuple[str, str, str, str, str, str]]:
    """Yields one row an item: position, time, writer, kind, what, effect."""
    time = time_text(entry.written_at_unix_s)
    for outcome in outcomes:
        yield (
            str(entry.position),
            time,
            entry.writer,
            outcome.item.kind,
            item_text(outcome.item) + _author_text(outcome.item),
            effect_text(outcome),
        )


def time_text(unix_s: float) -> str:
    """Returns a time in UTC, to the second."""
    return dt.datetime.fromtimestamp(unix_s, dt.UTC).strftime("%Y-%m-%d %H:%M:%S")


def entry_json(entry: Entry, outcomes: tuple[Outcome, ...], state: RunState) -> dict[str, Any]:
    """Returns an entry, and what the fold decided by it, as JSON values; `state` is the fold's after this entry.

    Each item says whether it was admitted, and else why not. `fates` has every delta that the entry accepted or
    decided, with its fate after the entry. So the last line that names a delta has its fate, and no reader has to fold.
    Of session ids, which let others push in a learner's name, it has the first digits.
    """
    return {
        "position": entry.position,
        "previous": entry.previous,
        "writer": entry.writer,
        "write_id": entry.write_id,
        "written_at_unix_s": entry.written_at_unix_s,
        "items": [
            {
                **_without_secrets(item_to_json(outcome.item)),
                "is_admitted": outcome.rejection is None,
                "rejection": None if outcome.rejection is None else outcome.rejection.reason,
                "rejection_detail": None if outcome.rejection is None else outcome.rejection.detail,
            }
            for outcome in outcomes
        ],
        "fates": [_fate_json(delta) for delta in _touched(outcomes, state)],
    }


def _without_secrets(item: dict[str, Any]) -> dict[str, Any]:
    return {**item, "session": item["session"][:_SHORT]} if "session" in item else item


def _touched(outcomes: tuple[Outcome, ...], state: RunState) -> Iterable[DeltaState]:
    """Returns the deltas that were accepted or decided, each once."""
    items = [outcome.item for outcome in outcomes if outcome.rejection is None]
    accepted = [item.delta for item in items if isinstance(item, AcceptedItem)]
    touched = {delta: state.deltas[delta] for delta in accepted if delta in state.deltas}
    return (touched | {delta.item.delta: delta for outcome in outcomes for delta in outcome.decided}).values()


def _fate_json(delta: DeltaState) -> dict[str, Any]:
    return {
        "delta": delta.item.delta,
        "fragment": delta.item.fragment,
        "learner": delta.item.learner,
        "fate": delta.fate,
        "version": delta.version if delta.fate is Fate.MERGED else None,
        "reason": delta.reason,
    }


def effect_text(outcome: Outcome) -> str:
    """Returns the effect of an item: the fates that it decided and whose they are, why it was rejected, or nothing."""
    if outcome.rejection is not None:
        return f"rejected: {outcome.rejection.reason}"
    learners: dict[str, list[str]] = {}
    for delta in outcome.decided:
        learners.setdefault(delta.fate, []).append(delta.item.learner)
    return ", ".join(
        f"{len(names)} {fate} of {', '.join(sorted(set(names)))}" for fate, names in sorted(learners.items())
    )


def item_text(item: Item) -> str:  # noqa: C901, PLR0911, PLR0912 - one branch a kind of item
    """Returns what an item says, in a few words."""
    match item:
        case SessionItem():
            region = f" in {item.region}" if item.region else ""
            return f"{item.learner}{region} attached, session {item.session[:_SHORT]}"
        case LeftItem():
            return f"{item.learner} left, session {item.session[:_SHORT]}"
        case AcceptedItem():
            steps = f"{item.step_count} steps, {item.token_count} tokens"
            return f"{item.fragment} {item.delta[:_SHORT]} of {item.learner} from version {item.base_version}, {steps}"
        case ClosedItem():
            again = f", attempt {item.attempt}" if item.attempt else ""
            return f"{item.fragment} version {item.version}: {len(item.members)} deltas{again}{_fates(item.decided)}"
        case CommittedItem():
            size = sum(ref.size_bytes for ref in item.update)
            return f"{item.fragment} version {item.version}, update of {size} bytes, digest {item.digest[:_SHORT]}"
        case FateItem():
            return _fates(item.decided).removeprefix(", ")
        case PolicyItem():
            return f"request {item.request_id[:_SHORT]}"
        case SnapshotItem():
            size = sum(ref.size_bytes for ref in (*item.weights, *item.outer))
            return f"{item.fragment} version {item.version}, {size} bytes"
        case RollbackItem():
            changes = ", ".join(f"{each.fragment} {each.source_version} as {each.version}" for each in item.fragments)
            return f"to position {item.target_position}: {changes}"
        case CollectedItem():
            return f"{len(item.names)} objects condemned"
        case StatusItem():
            return item.status
        case CheckpointItem():
            return f"of position {item.at}, {item.size_bytes} bytes"
        case _:
            assert_never(item)


def _author_text(item: Item) -> str:
    author = getattr(item, "author", "")
    return f", by {author}" if author else ""


def _fates(decided: tuple[Decided, ...]) -> str:
    return "".join(f", {each.delta[:_SHORT]} {each.fate}: {each.reason}" for each in decided)
