"""Reading the learners' metrics files while they are written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from skerry_learner.metrics import MetricsLine, parse_metrics_line


class MetricsFollower:
    """The metrics lines that one learner has written so far."""

    def __init__(self, path: Path) -> None:
        """Follow the file at `path`, which may not exist yet."""
        self.lines: list[MetricsLine] = []
        self._path = path
        self._offset = 0

    def poll(self) -> bool:
        """Read the lines that were added since the last call, and return whether there were any."""
        if not self._path.exists():
            return False
        with self._path.open("rb") as file:
            file.seek(self._offset)
            content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        self._offset += len(whole)
        self.lines += [parse_metrics_line(text) for text in whole.splitlines()]
        return bool(whole)

    @property
    def step(self) -> int:
        """The newest step, 0 before the first."""
        return self.lines[-1].step if self.lines else 0

    @property
    def evaluations(self) -> Iterator[tuple[MetricsLine, float]]:
        """The lines that have a held-out loss, with that loss; repeated lines are left out."""
        seen: set[tuple[int, int]] = set()
        for line in self.lines:
            key = (line.attempt, line.step)
            if line.val_loss is not None and key not in seen:
                seen.add(key)
                yield line, line.val_loss

    def final_of_attempts(self) -> list[MetricsLine]:
        """The last line of each process of this learner, which has that process's final counts."""
        return list({line.attempt: line for line in self.lines}.values())
