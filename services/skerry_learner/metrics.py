"""A learner's metrics file: one JSON object a line for each training step.

Every line is written at once, so a killed process loses at most the line that it is writing. A resumed learner appends
to the same file; `attempt` tells its lines from those of earlier processes.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Self


@dataclass(frozen=True)
class MetricsLine:
    """One inner step of one learner. Counts of bytes, parameters and deltas are totals of this attempt."""

    learner: str
    attempt: int
    """0 for the first process that wrote to the file, 1 for the next, and so on."""
    time_s: float
    """Seconds of training over all attempts, without the time between them."""
    unix_s: float
    step: int
    """Inner steps done, including this one. A resumed learner continues from its checkpoint."""
    tokens: int
    """Tokens trained on up to this step."""
    loss: float
    """Training loss of this step's batch, in nats a token; null in the file if it is not finite."""
    learning_rate: float
    step_time_ms: float
    """Forward, backward and optimizer, without synchronisation and evaluation."""
    slowdown_ms: float = 0.0
    """Time slept to emulate slower hardware."""
    sync_stall_ms: float = 0.0
    """Time that the training thread spent in `Learner.step` after this step."""
    sync_cpu_ms: float = 0.0
    """Processor time of the training thread within `sync_stall_ms`."""
    sync_queued_ms: float = 0.0
    """Time within `sync_stall_ms` that it was ready to run and waited for a processor; the rest is locks."""
    val_loss: float | None = None
    """Loss on the held-out windows, or null if this step did not evaluate."""
    run_progress: float | None = None
    """Inner steps of the run as the learner last heard them, or null."""
    is_attached: bool = False
    staleness: float = 0.0
    """Mean over the last merged deltas of the versions committed between a delta's base and its merge."""
    bytes_up: int = 0
    bytes_down: int = 0
    parameters_up: int = 0
    """Elements of acknowledged deltas: 8 * bytes_up / parameters_up is bits per parameter."""
    parameters_down: int = 0
    deltas_acknowledged: int = 0
    deltas_merged: int = 0
    deltas_returned: int = 0
    """Refused or expired: their work went into later ones."""
    deltas_dropped: int = 0
    """Quarantined, or not finite: their work is lost."""
    dropped_step_count: int = 0
    """Steps whose work is lost."""
    versions: dict[str, int] = field(default_factory=dict)
    """The version of each fragment that the model has adopted."""


def _is_json(value: object) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


class MetricsWriter:
    """Appends lines to a file; a context manager.

    An unfinished last line of a killed process is cut off first.
    """

    def __init__(self, path: Path) -> None:
        """Open `path` for appending; its directory is created."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab+", buffering=0)
        self._cut_torn_line()

    def write(self, line: MetricsLine) -> None:
        """Append `line`. Readers see it when this returns; it is not synced to the disk yet.

        Raises:
            OSError: it could not be written; the file is unchanged.
        """
        values = {name: value if _is_json(value) else None for name, value in asdict(line).items()}
        text = json.dumps(values, allow_nan=False, separators=(",", ":")).encode() + b"\n"
        begin = self._file.seek(0, os.SEEK_END)
        try:
            # A disk that becomes full may accept a part of the line.
            written = 0
            while written < len(text):
                written += self._file.write(text[written:])
        except OSError:
            self._file.truncate(begin)
            raise

    def close(self) -> None:
        """Sync the file and close it. Idempotent."""
        if not self._file.closed:
            os.fsync(self._file.fileno())
            self._file.close()

    def __enter__(self) -> Self:
        """Enter the context."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the file."""
        self.close()

    def _cut_torn_line(self) -> None:
        self._file.seek(0)
        content = self._file.read()
        whole = content.rfind(b"\n") + 1
        if whole != len(content):
            self._file.truncate(whole)


_FIELD_NAMES = frozenset(item.name for item in fields(MetricsLine))


def parse_metrics_line(text: str | bytes) -> MetricsLine:
    """One line of the file. Unknown fields, which a newer version may write, are ignored.

    Raises:
        ValueError: it is not a JSON object, or lacks a field without a default.
    """
    value: Any = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(f"a metrics line must be a JSON object. line={text!r:.80}")  # noqa: TRY004 - the file's content is wrong, not a type in the program
    if value.get("loss", 0) is None:
        value["loss"] = math.nan
    try:
        return MetricsLine(**{name: item for name, item in value.items() if name in _FIELD_NAMES})
    except TypeError as error:
        raise ValueError(f"a metrics line lacks fields. line={text!r:.80}") from error


def read_metrics(path: Path) -> Iterator[MetricsLine]:
    """All complete lines of the file at `path`, in order; none if there is no file."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for text in file:
            if text.endswith(b"\n"):
                yield parse_metrics_line(text)
