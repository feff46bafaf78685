"""Counts of what the exchange has done, for the training loop's metrics."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

# How many of the last merged deltas, of all fragments, staleness and waiting are averaged over.
_RECENT: Final = 32


@dataclass(frozen=True)
class Stats:
    """A learner's exchange at one moment. Counts only grow; they start at 0 with the process."""

    step_count: int = 0
    token_count: int = 0
    is_attached: bool = False
    bytes_up: int = 0  # of deltas, as frames; repeated pushes count again
    bytes_down: int = 0  # of updates and snapshots
    parameters_up_count: int = 0  # elements of acknowledged deltas: bytes_up * 8 over this is bits a parameter
    parameters_down_count: int = 0  # elements of adopted fragments
    deltas_acknowledged: int = 0
    deltas_merged: int = 0
    deltas_returned: int = 0  # refused or expired: their work went into a later delta
    deltas_dropped: int = 0  # poisoned or quarantined: their work is gone
    versions: Mapping[str, int] = field(default_factory=dict)  # adopted, by fragment
    staleness: float = 0.0  # mean over the deltas merged last
    waiting_s: float = 0.0  # mean from snapshot to the news of being merged, over the same
    stall_s_last: float = 0.0  # inside the last step()
    stall_s_max: float = 0.0


_COUNTS: Final = tuple(
    name for name in Stats.__annotations__ if name.startswith(("bytes_", "parameters_", "deltas_", "stall_"))
)


class Tally:
    """The running counts. The event loop writes them, except the stalls, which the training thread writes."""

    bytes_up: int = 0
    bytes_down: int = 0
    parameters_up_count: int = 0
    parameters_down_count: int = 0
    deltas_acknowledged: int = 0
    deltas_merged: int = 0
    deltas_returned: int = 0
    deltas_dropped: int = 0
    stall_s_last: float = 0.0
    stall_s_max: float = 0.0
    stall_s_since_report: float = 0.0

    def __init__(self) -> None:
        self._staleness: deque[int] = deque(maxlen=_RECENT)
        self._waiting_s: deque[float] = deque(maxlen=_RECENT)

    def sent(self, size_bytes: int) -> None:
        """Counts bytes of frames that went up."""
        self.bytes_up += size_bytes

    def received(self, size_bytes: int) -> None:
        """Counts bytes of objects that came down."""
        self.bytes_down += size_bytes

    def merged(self, staleness: int, waiting_s: float) -> None:
        """Counts a delta that was merged."""
        self.deltas_merged += 1
        self._staleness.append(staleness)
        self._waiting_s.append(waiting_s)

    def stalled(self, stall_s: float) -> None:
        """Counts the time that one step() took."""
        self.stall_s_last = stall_s
        self.stall_s_max = max(self.stall_s_max, stall_s)
        self.stall_s_since_report = max(self.stall_s_since_report, stall_s)

    def stats(self, *, step_count: int, token_count: int, is_attached: bool, versions: Mapping[str, int]) -> Stats:
        """Returns the counts now."""
        return Stats(
            step_count=step_count,
            token_count=token_count,
            is_attached=is_attached,
            versions=versions,
            staleness=_mean(tuple(self._staleness)),
            waiting_s=_mean(tuple(self._waiting_s)),
            **{name: getattr(self, name) for name in _COUNTS},
        )


def _mean(values: tuple[float, ...]) -> float:
    return sum(values) / len(values) if values else 0.0
