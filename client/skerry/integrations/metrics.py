"""What a learner's exchange looks like in a log of metrics."""

from __future__ import annotations

from typing import Final

from skerry import ArrayLearner

__all__ = ["learner_metrics"]

_LOGGED: Final = (
    "deltas_acknowledged", "deltas_merged", "deltas_returned", "deltas_dropped", "dropped_step_count",
    "unsent_step_count", "staleness",
    "bytes_up", "bytes_down", "stall_s_max",
)  # fmt: skip


def learner_metrics(learner: ArrayLearner) -> dict[str, float]:
    """Returns the numbers of a learner's `stats` that are worth a curve, named `skerry/...`, for any tracker.

    `skerry/is_exchanging` is 0 while the syncer can't be reached and once the learner has stopped; `skerry/version` is
    that of the fragment which has the oldest; `skerry/progress` is the run's, from 0 to 1. The loss, the progress and
    the time of a step are missing while they are not known. Cheap enough for every step.
    """
    stats = learner.stats
    values = {name: getattr(stats, name) for name in _LOGGED}
    values |= {"is_exchanging": stats.is_attached, "version": min(stats.versions.values())}
    values |= {"loss": stats.loss, "progress": learner.progress, "step_time_s": stats.step_time_s}
    return {f"skerry/{name}": float(value) for name, value in values.items() if value is not None}
