"""A learner's `skerry.Stats` for Prometheus, read at each scrape: a metric a field, `skerry_learner_` and its name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from skerry import ArrayLearner, SkerryError, Stats

_COUNTERS: Final = ("bytes_", "parameters_", "deltas_", "causes")  # what their names start with
# The label that tells the samples of a field apart, besides run and learner.
_LABELS: Final = {"versions": "fragment", "causes": "cause", "problem": "reason", "failure": "reason"}


class LearnerMetrics:
    """The metrics of one learner, with its id and run for labels."""

    def __init__(self, learner: ArrayLearner, *, run: str, learner_id: str) -> None:
        self._learner = learner
        self._labels = {"run": run, "learner": learner_id}

    def collect(self) -> Iterator[Metric]:
        """Yields every metric as it is now; those that are not known, or not the case, have no sample."""
        stats = self._learner.stats
        for name, kind, labels in metric_families(stats):
            metric = kind(f"skerry_learner_{name}", f"{name} of skerry.Stats.", labels=labels)
            value = getattr(stats, name)
            samples = value if isinstance(value, Mapping) else {"": value}
            if isinstance(value, SkerryError):
                samples = {value.reason: True}
            for key, number in samples.items():
                if number is not None:
                    metric.add_metric((*self._labels.values(), key)[: len(labels)], number)
            yield metric


def metric_families(
    stats: Stats,
) -> Iterator[tuple[str, type[CounterMetricFamily | GaugeMetricFamily], tuple[str, ...]]]:
    """Yields each field's name, and the type and the labels of its metric."""
    for name in vars(stats):
        kind = CounterMetricFamily if name.startswith(_COUNTERS) else GaugeMetricFamily
        yield name, kind, ("run", "learner", *filter(None, [_LABELS.get(name)]))
