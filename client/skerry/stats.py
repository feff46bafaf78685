"""What a learner tells of its exchange: statistics, what became of the last work, and the counts behind both."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from skerry.errors import SkerryError

# How many of the last merged deltas, of all fragments, staleness and waiting are averaged over.
_RECENT: Final = 32


@dataclass(frozen=True)
class Stats:
    """A learner's exchange at one moment. Counts only grow; they start at 0 with the process."""

    step_count: int = 0
    token_count: int = 0
    unsent_step_count: int = 0  # steps in no acknowledged delta, of the fragment with the most of them
    # Failure of the last call, until a delta is acknowledged; or why the last delta of a fragment was not merged, until
    # one of the fragment is.
    problem: SkerryError | None = None
    is_attached: bool = False
    bytes_up: int = 0  # bytes of deltas, as frames; repeated pushes count again
    bytes_down: int = 0  # bytes of updates and snapshots
    parameters_up_count: int = 0  # elements of acknowledged deltas: bytes_up * 8 over this is bits a parameter
    parameters_down_count: int = 0  # elements of adopted fragments
    deltas_acknowledged: int = 0
    deltas_merged: int = 0
    deltas_returned: int = 0  # refused or expired: their work went into a later delta
    deltas_dropped: int = 0  # poisoned or quarantined: their work is gone
    causes: Mapping[str, int] = field(default_factory=dict)  # of the last two counts: how many deltas had each cause
    dropped_step_count: int = 0  # steps whose work is gone, of the fragment with the most of them
    versions: Mapping[str, int] = field(default_factory=dict)  # the adopted version of each fragment
    staleness: float = 0.0  # mean over the last merged deltas
    waiting_s: float = 0.0  # mean time from copying the weights to hearing of the merge, over the same
    stall_s_last: float = 0.0  # time that Skerry took in the last step()
    stall_s_max: float = 0.0
    loss: float | None = None  # loss of the last step, as the training loop reported it
    step_time_s: float | None = None  # moving average of the time of a step
    progress: float | None = None  # of the run, 0 to 1; None before it is known, and where no length is planned
    planned_token_count: int = 0  # tokens of all learners; 0 where no length is planned
    is_closed: bool = False  # the run takes no more deltas
    failure: SkerryError | None = None  # why the exchange stopped for good


@dataclass(frozen=True)
class LastWork:
    """What became of a learner's last work: of each kind the steps, of the fragment with the most of them.

    It is true where the run has all of the work, or will merge it; and where the run's weights were asked for, if the
    model has them.
    """

    merged_step_count: int = 0  # of the last delta, in a version
    pending_step_count: int = 0  # acknowledged; the run has not decided yet
    dropped_step_count: int = 0  # quarantined, or not finite: gone
    unsent_step_count: int = 0  # not acknowledged, or expired
    because: str = ""  # why there are steps of the last two
    is_loaded: bool | None = None  # whether the model has the run's weights; None: they were not asked for

    def __bool__(self) -> bool:
        """Whether nothing of the work is missing from the run."""
        return not (self.dropped_step_count or self.unsent_step_count or self.is_loaded is False)

    def __or__(self, other: LastWork) -> LastWork:
        """Returns what became of the work of both."""
        counts = {name: max(getattr(self, name), getattr(other, name)) for name in _STEP_COUNTS}
        return replace(self, **counts, because=self.because or other.because)


def share_of_plan(token_count: float, planned_token_count: int) -> float | None:
    """Returns tokens as a share of the planned ones, at most 1; None where none are planned."""
    return min(1.0, token_count / planned_token_count) if planned_token_count else None


def sum_of(ranks: Sequence[Stats]) -> Stats:
    """Returns the statistics of ranks with different fragments as those of one learner.

    Means are those of the rank where they are largest.
    """
    changes: dict[str, Any] = {}
    for name in Stats.__annotations__:
        values = [getattr(stats, name) for stats in ranks]
        if name.startswith(("bytes_", "parameters_", "deltas_")):
            changes[name] = sum(values)
        elif name.startswith(("unsent_", "dropped_", "stall_", "staleness", "waiting_")):
            changes[name] = max(values)
    return replace(
        ranks[0],
        **changes,
        causes=dict(sum((Counter(stats.causes) for stats in ranks), Counter())),
        problem=next((stats.problem for stats in ranks if stats.problem), None),
        is_closed=any(stats.is_closed for stats in ranks),
        failure=next((stats.failure for stats in ranks if stats.failure), None),
        versions={name: version for stats in ranks for name, version in stats.versions.items()},
    )


_STEP_COUNTS: Final = tuple(name for name in LastWork.__annotations__ if name.endswith("_step_count"))
_COUNTS: Final = tuple(
    name for name in Stats.__annotations__ if name.startswith(("bytes_", "parameters_", "deltas_", "stall_"))
)


class Tally:
    """The running counts. The event loop writes them, except the stalls, which the training thread writes."""

    bytes_up = bytes_down = parameters_up_count = parameters_down_count = 0
    deltas_acknowledged = deltas_merged = deltas_returned = deltas_dropped = 0
    stall_s_last = stall_s_max = stall_s_since_report = 0.0

    def __init__(self) -> None:
        self.causes: dict[str, int] = {}
        self._staleness: deque[int] = deque(maxlen=_RECENT)
        self._waiting_s: deque[float] = deque(maxlen=_RECENT)

    def not_merged(self, cause: str, *, is_lost: bool) -> int:
        """Counts a delta whose work goes into a later one, or is lost; returns how many have had the cause."""
        if is_lost:
            self.deltas_dropped += 1
        else:
            self.deltas_returned += 1
        self.causes[cause] = self.causes.get(cause, 0) + 1
        return self.causes[cause]

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

    def stats(self, **others: Any) -> Stats:
        """Returns the counts now, with the fields that are not counted here."""
        return Stats(
            **others,
            staleness=_mean(tuple(self._staleness)),
            waiting_s=_mean(tuple(self._waiting_s)),
            causes=dict(self.causes),
            **{name: getattr(self, name) for name in _COUNTS},
        )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
