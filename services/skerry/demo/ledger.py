"""What the run's log says: every delta with its fate, every version with its time, and where the run stood when.

The log is read as `skerry log --json` prints it: one entry a line, with its items. An item that the fold refused had no
effect and is passed over.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

_INITIAL_BASE: Final = -1
_PENDING: Final = "pending"
_MERGED: Final = "merged"


@dataclass(frozen=True)
class LoggedDelta:
    """A delta that was accepted, and what became of it."""

    delta_id: str
    learner: str
    session: str
    fragment: str
    step_count: int
    token_count: int
    size_bytes: int
    """Of its parts as they were stored."""
    accepted_at_unix_s: float
    fate: str = _PENDING
    reason: str = ""


@dataclass(frozen=True)
class LoggedVersion:
    """A version that was committed."""

    fragment: str
    version: int
    position: int
    committed_at_unix_s: float
    size_bytes: int
    """Of the update that leads to it."""


@dataclass(frozen=True)
class Ledger:
    """The log, read to its end."""

    deltas: Mapping[str, LoggedDelta]
    versions: tuple[LoggedVersion, ...]
    initial_position: int
    """The position at which the run had its initial weights and nothing else."""
    final_position: int

    def counts_by_fate(self) -> dict[str, int]:
        """How many deltas met each fate; those without one are `pending`."""
        return dict(Counter(delta.fate for delta in self.deltas.values()))

    @property
    def merged_count(self) -> int:
        """Deltas that are part of a version."""
        return sum(delta.fate == _MERGED for delta in self.deltas.values())

    @property
    def named_unmerged_count(self) -> int:
        """Deltas that met another fate, by name: superseded, expired or quarantined."""
        return sum(delta.fate not in {_MERGED, _PENDING} for delta in self.deltas.values())

    @property
    def pending_count(self) -> int:
        """Deltas without a fate; a closed run has none."""
        return sum(delta.fate == _PENDING for delta in self.deltas.values())

    def positions_to_judge(self, count: int) -> list[tuple[int, float]]:
        """At most `count` commits' positions with their times, evenly spread over time, the last always among them."""
        if not self.versions:
            return []
        first_s = self.versions[0].committed_at_unix_s
        span_s = self.versions[-1].committed_at_unix_s - first_s
        chosen: dict[int, float] = {}
        for number in range(1, count + 1):
            wanted_s = first_s + span_s * number / count
            version = min(self.versions, key=lambda version: abs(version.committed_at_unix_s - wanted_s))
            chosen[version.position] = version.committed_at_unix_s
        last = self.versions[-1]
        chosen[last.position] = last.committed_at_unix_s
        return sorted(chosen.items())


def read_ledger(lines: Iterable[str]) -> Ledger:
    """The ledger of a log of which each of `lines` is an entry in JSON.

    Raises:
        ValueError: a line isn't an entry.
    """
    reader = _Reader()
    for text in lines:
        if text.strip():
            reader.read(json.loads(text))
    return Ledger(reader.deltas, tuple(reader.versions), reader.initial_position, reader.position)


class _Reader:
    """Follows the log entry by entry."""

    def __init__(self) -> None:
        self.deltas: dict[str, LoggedDelta] = {}
        self.versions: list[LoggedVersion] = []
        self.initial_position = 0
        self.position = 0
        self._members: dict[tuple[str, int, int], list[str]] = {}

    def read(self, entry: Mapping[str, Any]) -> None:
        try:
            self.position = entry["position"]
            for item in entry["items"]:
                if not item.get("rejection"):
                    self._read_item(item, entry["written_at_unix_s"])
        except (KeyError, TypeError) as error:
            message = f"not a log entry: {error!r}. entry={str(entry)[:200]}"
            raise ValueError(message) from error

    def _read_item(self, item: Mapping[str, Any], unix_s: float) -> None:
        match item["kind"]:
            case "accepted" if item["base_version"] != _INITIAL_BASE:
                self._accept(item, unix_s)
            case "closed":
                members = [member["delta"] for member in item["members"]]
                self._members[item["fragment"], item["version"], item["attempt"]] = members
                self._decide(item["decided"])
            case "committed":
                self._commit(item, unix_s)
            case "fates":
                self._decide(item["decided"])
            case "status" if item["status"] == "open":
                self.initial_position = self.position

    def _accept(self, item: Mapping[str, Any], unix_s: float) -> None:
        self.deltas[item["delta"]] = LoggedDelta(
            delta_id=item["delta"],
            learner=item["learner"],
            session=item["session"],
            fragment=item["fragment"],
            step_count=item["step_count"],
            token_count=item["token_count"],
            size_bytes=sum(part["size_bytes"] for part in item["parts"]),
            accepted_at_unix_s=unix_s,
        )

    def _commit(self, item: Mapping[str, Any], unix_s: float) -> None:
        for delta_id in self._members[item["fragment"], item["version"], item["attempt"]]:
            self.deltas[delta_id] = replace(self.deltas[delta_id], fate=_MERGED)
        self.versions.append(
            LoggedVersion(
                fragment=item["fragment"],
                version=item["version"],
                position=self.position,
                committed_at_unix_s=unix_s,
                size_bytes=sum(part["size_bytes"] for part in item["update"]),
            )
        )

    def _decide(self, decided: Iterable[Mapping[str, Any]]) -> None:
        for decision in decided:
            delta = self.deltas[decision["delta"]]
            self.deltas[decision["delta"]] = replace(delta, fate=decision["fate"], reason=decision["reason"])
