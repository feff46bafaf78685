"""The metrics that a learner serves to Prometheus, read at each scrape; docs/operating.md has the main ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from skerry import Stats
from skerry_learner.training import AttachedLearner

_LABELS: Final = ("run", "learner")
_Value = Callable[[Stats], float | None]
_COUNTERS: Final[dict[str, tuple[str, _Value]]] = {
    "skerry_learner_steps": ("Inner steps.", lambda stats: stats.step_count),
    "skerry_learner_tokens": ("Tokens trained on.", lambda stats: stats.token_count),
    "skerry_learner_sent_bytes": ("Bytes of deltas sent.", lambda stats: stats.bytes_up),
    "skerry_learner_received_bytes": ("Bytes of updates and snapshots received.", lambda stats: stats.bytes_down),
    "skerry_learner_deltas_acknowledged": ("Deltas acknowledged.", lambda stats: stats.deltas_acknowledged),
    "skerry_learner_deltas_merged": ("Deltas merged.", lambda stats: stats.deltas_merged),
    "skerry_learner_deltas_returned": ("Deltas whose work goes out again.", lambda stats: stats.deltas_returned),
    "skerry_learner_deltas_dropped": ("Deltas whose work is lost.", lambda stats: stats.deltas_dropped),
    "skerry_learner_dropped_steps": ("Steps whose work is lost.", lambda stats: stats.dropped_step_count),
}
_GAUGES: Final[dict[str, tuple[str, _Value]]] = {
    "skerry_learner_attached": ("Whether a syncer has the learner's stream.", lambda stats: stats.is_attached),
    "skerry_learner_unsent_steps": ("Steps in no acknowledged delta.", lambda stats: stats.unsent_step_count),
    "skerry_learner_loss": ("Loss of the last step.", lambda stats: stats.loss),
    "skerry_learner_step_duration_seconds": ("Time of a step.", lambda stats: stats.step_time_s),
    "skerry_learner_staleness_versions": ("Staleness of merged deltas.", lambda stats: stats.staleness),
    "skerry_learner_merge_wait_seconds": ("Time until a delta is merged.", lambda stats: stats.waiting_s),
    "skerry_learner_stall_seconds": ("Time that the last step() took.", lambda stats: stats.stall_s_last),
    "skerry_learner_longest_stall_seconds": ("The longest time that a step() took.", lambda stats: stats.stall_s_max),
}


class LearnerMetrics:
    """The metrics of one learner, with its id and run for labels."""

    def __init__(self, learner: AttachedLearner, *, run: str, learner_id: str) -> None:
        self._learner = learner
        self._values = (run, learner_id)

    def collect(self) -> Iterator[Metric]:
        """Yields every metric as it is now; those that are not known yet have no sample."""
        stats, failure = self._learner.stats, self._learner.failure
        for name, (documentation, value) in _COUNTERS.items():
            yield self._filled(CounterMetricFamily(name, documentation, labels=_LABELS), value(stats))
        for name, (documentation, value) in _GAUGES.items():
            yield self._filled(GaugeMetricFamily(name, documentation, labels=_LABELS), value(stats))
        yield self._filled(
            GaugeMetricFamily("skerry_learner_run_progress_steps", "Inner steps of the run.", labels=_LABELS),
            self._learner.progress,
        )
        unmerged = CounterMetricFamily(
            "skerry_learner_deltas_not_merged", "Deltas that were not merged.", labels=(*_LABELS, "cause")
        )
        for cause, count in sorted(stats.causes.items()):
            unmerged.add_metric((*self._values, cause), count)
        yield unmerged
        problem = GaugeMetricFamily("skerry_learner_problem", "What is wrong now.", labels=(*_LABELS, "reason"))
        reason = "" if stats.problem is None else stats.problem.reason
        problem.add_metric((*self._values, reason), stats.problem is not None)
        yield problem
        stopped = GaugeMetricFamily(
            "skerry_learner_stopped", "Whether the exchange ended for good.", labels=(*_LABELS, "reason")
        )
        stopped.add_metric((*self._values, "" if failure is None else failure.reason), failure is not None)
        yield stopped
        versions = GaugeMetricFamily(
            "skerry_learner_version", "The version that was adopted.", labels=(*_LABELS, "fragment")
        )
        for fragment, version in sorted(stats.versions.items()):
            versions.add_metric((*self._values, fragment), version)
        yield versions

    def _filled(self, family: CounterMetricFamily | GaugeMetricFamily, value: float | None) -> Metric:
        if value is not None:
            family.add_metric(self._values, value)
        return family
