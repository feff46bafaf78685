"""A learner's metrics file: one JSON object a line for each training step.

Every line is written at once, so a killed process loses at most the line that it is writing. A restarted learner
appends to the same file.

    learner, attempt        who wrote the line: the id, and the number of the process, from 0
    time_s, unix_s          seconds of training over all processes, without the time between them; calendar time
    step, tokens            inner steps and tokens done, this step's included, over all processes
    loss, val_loss          nats a token: of this step's batch, and of the held-out windows (null: not evaluated)
    learning_rate
    step_time_ms            forward, backward and optimizer
    slowdown_ms             sleep that emulates slower hardware
    sync_stall_ms           time in `Learner.step` after this step
    step_count, bytes_up, ...
                            the fields of `skerry.Stats` but errors, of this process; not of a learner that is alone

A float that is not finite, such as a loss that diverged, is null, since JSON has no word for it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self


class MetricsFile:
    """Appends lines to a file; a context manager."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab+", buffering=0)
        last = self._cut_torn_line()
        self.attempt = json.loads(last)["attempt"] + 1 if last else 0

    def write(self, values: Mapping[str, Any]) -> None:
        """Appends a line. Readers see it when this returns.

        Raises:
            OSError: it could not be written; the file ends with the line before it.
        """
        finite = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in values.items()
        }
        try:
            text = memoryview(json.dumps(finite, separators=(",", ":")).encode() + b"\n")
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

    def _cut_torn_line(self) -> bytes:
        """Returns the last whole line, and removes what is behind it."""
        self._file.seek(0)
        whole = self._file.read().rpartition(b"\n")[0]
        self._file.truncate(len(whole) + 1 if whole else 0)
        return whole.rpartition(b"\n")[2]
