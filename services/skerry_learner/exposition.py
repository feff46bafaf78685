"""The metrics that a learner serves to Prometheus, read at each scrape; docs/operating.md has the main ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from skerry import ArrayLearner, Stats

_Kind = type[CounterMetricFamily] | type[GaugeMetricFamily]
_Value = Callable[[Stats], float | None]
_COUNTER, _GAUGE = CounterMetricFamily, GaugeMetricFamily
_OF_STATS: Final[Mapping[str, tuple[_Kind, str, _Value]]] = {
    "steps": (_COUNTER, "Inner steps.", lambda stats: stats.step_count),
    "tokens": (_COUNTER, "Tokens trained on.", lambda stats: stats.token_count),
    "sent_bytes": (_COUNTER, "Bytes of deltas sent.", lambda stats: stats.bytes_up),
    "received_bytes": (_COUNTER, "Bytes of updates and snapshots received.", lambda stats: stats.bytes_down),
    "deltas_acknowledged": (_COUNTER, "Deltas acknowledged.", lambda stats: stats.deltas_acknowledged),
    "deltas_merged": (_COUNTER, "Deltas merged.", lambda stats: stats.deltas_merged),
    "deltas_returned": (_COUNTER, "Deltas whose work goes out again.", lambda stats: stats.deltas_returned),
    "deltas_dropped": (_COUNTER, "Deltas whose work is lost.", lambda stats: stats.deltas_dropped),
    "dropped_steps": (_COUNTER, "Steps whose work is lost.", lambda stats: stats.dropped_step_count),
    "attached": (_GAUGE, "Whether a syncer has the learner's stream.", lambda stats: stats.is_attached),
    "unsent_steps": (_GAUGE, "Steps in no acknowledged delta.", lambda stats: stats.unsent_step_count),
    "loss": (_GAUGE, "Loss of the last step.", lambda stats: stats.loss),
    "step_duration_seconds": (_GAUGE, "Time of a step.", lambda stats: stats.step_time_s),
    "staleness_versions": (_GAUGE, "Staleness of merged deltas.", lambda stats: stats.staleness),
    "merge_wait_seconds": (_GAUGE, "Time until a delta is merged.", lambda stats: stats.waiting_s),
    "stall_seconds": (_GAUGE, "Time that the last step() took.", lambda stats: stats.stall_s_last),
    "longest_stall_seconds": (_GAUGE, "The longest time that a step() took.", lambda stats: stats.stall_s_max),
}


class LearnerMetrics:
    """The metrics of one learner, with its id and run for labels."""

    def __init__(self, learner: ArrayLearner, *, run: str, learner_id: str) -> None:
        self._learner = learner
        self._labels = {"run": run, "learner": learner_id}

    def collect(self) -> Iterator[Metric]:
        """Yields every metric as it is now; those that are not known yet have no sample."""
        stats, failure = self._learner.stats, self._learner.failure
        problem = "" if stats.problem is None else stats.problem.reason
        for name, (kind, documentation, value) in _OF_STATS.items():
            yield self._metric(kind, name, documentation, {"": value(stats)})
        yield self._metric(_GAUGE, "run_progress_steps", "Inner steps of the run.", {"": self._learner.progress})
        yield self._metric(
            _COUNTER, "deltas_not_merged", "Deltas that were not merged.", dict(sorted(stats.causes.items())), "cause"
        )
        yield self._metric(_GAUGE, "problem", "What is wrong now.", {problem: stats.problem is not None}, "reason")
        yield self._metric(
            _GAUGE,
            "stopped",
            "Whether the exchange ended for good.",
            {failure.reason if failure else "": failure is not None},
            "reason",
        )
        yield self._metric(_GAUGE, "version", "The version that was adopted.", stats.versions, "fragment")

    def _metric(
        self, kind: _Kind, name: str, documentation: str, values: Mapping[str, float | None], *label: str
    ) -> Metric:
        """Returns a metric with a sample for each value that is known, by the value of its further label, if any."""
        metric = kind(f"skerry_learner_{name}", documentation, labels=(*self._labels, *label))
        for key, value in values.items():
            if value is not None:
                metric.add_metric((*self._labels.values(), key)[: 2 + len(label)], value)
        return metric
