"""The learner's own account of its training: one JSON object a line, appended as it happens.

Lines are written whole and at once, so that a reader that follows the file, or finds it after the process was killed,
loses at most the line being written. A resumed learner appends to the same file; `attempt` tells its lines from those
of the processes before it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import TracebackType
from typing import Any, Self


@dataclass(frozen=True)
class MetricsLine:
    """What one inner step of one learner was like. Byte and delta counts are of this attempt, from its start."""

    learner: str
    attempt: int
    """0 for the first process that wrote to the file, one more for each that resumed it."""
    time_s: float
    """Seconds of training over all attempts; time between attempts doesn't count."""
    unix_s: float
    step: int
    """Inner steps done, this one counted; continues from the checkpoint on resume."""
    tokens: int
    """Tokens trained on, over all attempts that a checkpoint kept."""
    loss: float
    """Training loss of this step's batch, in nats a token."""
    learning_rate: float
    step_time_ms: float
    """Forward, backward and optimizer, without the synchronisation and without evaluation."""
    slowdown_ms: float = 0.0
    """Time slept to emulate slower hardware."""
    sync_stall_ms: float = 0.0
    """Time that the training thread spent in the synchronisation at this step's boundary."""
    sync_cpu_ms: float = 0.0
    """Processor time of the training thread within `sync_stall_ms`."""
    sync_queued_ms: float = 0.0
    """Time within `sync_stall_ms` that it was ready to run, but others had the processors; the rest is locks."""
    val_loss: float | None = None
    """Loss on the fixed held-out windows where this step evaluated, else null."""
    run_progress: float | None = None
    """Inner steps of the run as a whole, as last heard, else null."""
    is_attached: bool = False
    staleness: float = 0.0
    """Mean over the deltas merged last: versions committed between a delta's base and its merge."""
    bytes_up: int = 0
    bytes_down: int = 0
    parameters_up: int = 0
    """Elements sent in deltas, so that 8 * bytes_up / parameters_up is bits a parameter."""
    parameters_down: int = 0
    deltas_acknowledged: int = 0
    deltas_merged: int = 0
    versions: dict[str, int] = field(default_factory=dict)
    """The version of each fragment that the model holds."""


class MetricsWriter:
    """Appends lines to a file; a context manager.

    What a killed process left of an unfinished last line is cut off first, so that every line of the file is whole.
    """

    def __init__(self, path: Path) -> None:
        """Open `path` for appending, making its directory."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab+", buffering=0)
        self._cut_torn_line()

    def write(self, line: MetricsLine) -> None:
        """Append `line`; it is visible to readers when this returns, though not yet synced to the disk.

        Raises:
            OSError: it couldn't be written; nothing of it was.
        """
        text = json.dumps(asdict(line), separators=(",", ":")).encode() + b"\n"
        begin = self._file.seek(0, os.SEEK_END)
        try:
            # A disk that runs full may take a part first, and refuse the rest.
            written = 0
            while written < len(text):
                written += self._file.write(text[written:])
        except OSError:
            self._file.truncate(begin)
            raise

    def close(self) -> None:
        """Sync the file and close it; a second call does nothing."""
        if not self._file.closed:
            os.fsync(self._file.fileno())
            self._file.close()

    def __enter__(self) -> Self:
        """Enter the context."""
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the file, whatever happened."""
        self.close()

    def _cut_torn_line(self) -> None:
        self._file.seek(0)
        content = self._file.read()
        whole = content.rfind(b"\n") + 1
        if whole != len(content):
            self._file.truncate(whole)


_FIELD_NAMES = frozenset(item.name for item in fields(MetricsLine))


def parse_metrics_line(text: str | bytes) -> MetricsLine:
    """One line of the file; fields that a newer version wrote are passed over.

    Raises:
        ValueError: it isn't a JSON object, or lacks a field that has no default.
    """
    value: Any = json.loads(text)
    if not isinstance(value, dict):
        message = f"a metrics line must be a JSON object. line={text!r:.80}"
        raise ValueError(message)  # noqa: TRY004 - what is wrong is the file's content
    try:
        return MetricsLine(**{name: item for name, item in value.items() if name in _FIELD_NAMES})
    except TypeError as error:
        message = f"a metrics line lacks fields. line={text!r:.80}"
        raise ValueError(message) from error


def read_metrics(path: Path) -> Iterator[MetricsLine]:
    """All whole lines of the file at `path`, in order; none where there is no file."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for text in file:
            if text.endswith(b"\n"):
                yield parse_metrics_line(text)
