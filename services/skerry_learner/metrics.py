"""A learner's metrics file: one JSON object a line for each training step.

Every line is written at once, so a killed process loses at most the line that it is writing. A resumed learner appends
to the same file; `attempt` tells its lines from those of earlier processes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Self


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


class MetricsWriter:
    """Appends lines to a file; a context manager."""

    def __init__(self, path: Path) -> None:
        """Opens `path` for appending; its directory is created."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab+", buffering=0)
        self._cut_torn_line()

    def write(self, line: MetricsLine) -> None:
        """Appends `line`. Readers see it when this returns.

        Raises:
            OSError: it could not be written; the file ends with the line before it.
        """
        values = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in asdict(line).items()
        }
        try:
            text = memoryview(json.dumps(values, separators=(",", ":")).encode() + b"\n")
            while text:  # a disk that becomes full may accept a part of the line
                text = text[self._file.write(text) :]
        except OSError:
            self._cut_torn_line()
            raise

    def __enter__(self) -> Self:
        """Enters the context."""
        return self

    def __exit__(self, *_: object) -> None:
        """Closes the file."""
        self._file.close()

    def _cut_torn_line(self) -> None:
        self._file.seek(0)
        self._file.truncate(self._file.read().rfind(b"\n") + 1)


def read_metrics(path: Path) -> Iterator[MetricsLine]:
    """Yields the whole lines of the file at `path`, in order; none if there is no file.

    Raises:
        ValueError: a line is no JSON, or lacks a field without a default.
    """
    names = {item.name for item in fields(MetricsLine)}
    for text in path.read_bytes().splitlines(keepends=True) if path.exists() else []:
        if text.endswith(b"\n"):
            values = {name: value for name, value in json.loads(text).items() if name in names}
            try:
                yield MetricsLine(**values | {"loss": math.nan if values["loss"] is None else values["loss"]})
            except (TypeError, KeyError) as error:
                raise ValueError(f"a metrics line lacks fields. path={path}, line={text!r:.80}") from error
