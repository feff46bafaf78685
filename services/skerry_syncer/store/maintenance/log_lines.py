"""Formats the entries of a run's log: as table rows for people, as JSON for scripts."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Iterator
from typing import Any, assert_never

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
from skerry_syncer.store.log.state import DeltaState, Outcome, RunState

_SHORT: int = 8  # digits of a 32-digit id that are shown to people


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
        "fates": [_fate_json(state.deltas[delta]) for delta in _touched(outcomes)],
    }


def _without_secrets(item: dict[str, Any]) -> dict[str, Any]:
    return {**item, "session": item["session"][:_SHORT]} if "session" in item else item


def _touched(outcomes: tuple[Outcome, ...]) -> Iterable[str]:
    """Returns the ids of the deltas that were accepted or decided, each once."""
    accepted = [
        outcome.item.delta
        for outcome in outcomes
        if isinstance(outcome.item, AcceptedItem) and outcome.rejection is None
    ]
    decided = [delta.item.delta for outcome in outcomes for delta in outcome.decided]
    return dict.fromkeys(accepted + decided)


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
        f"{len(owners)} {fate} of {', '.join(sorted(set(owners)))}" for fate, owners in sorted(learners.items())
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
            changes = ", ".join(f"{one.fragment} {one.source_version} as {one.version}" for one in item.fragments)
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
    return "".join(f", {one.delta[:_SHORT]} {one.fate}: {one.reason}" for one in decided)
