"""Writes docker/grafana/skerry.json from the metrics that syncers and learners serve: `make board`.

Each metric has a panel whose title is its HELP text and whose query follows from its type and labels.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from prometheus_client import Histogram
from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics import MetricWrapperBase

from skerry import Stats
from skerry.runtime.clock import SystemClock
from skerry_learner.exposition import metric_families
from skerry_syncer.run.metrics import _GAUGES, SyncerMetrics

PATH = Path(__file__).parents[1] / "docker" / "grafana" / "skerry.json"
_COLUMNS, _WIDTH, _HEIGHT = 24, 8, 7
# Of these the smallest over replicas says most: a replica that opened a run later has seen nothing for less long.
_SMALLEST = {"skerry_version_age_seconds"}


class Family(NamedTuple):
    """A metric by the name that samples have."""

    name: str
    kind: str  # counter, gauge, histogram
    text: str
    labels: tuple[str, ...]


def syncer_families() -> Iterator[Family]:
    """Yields the metrics of a syncer."""
    for metric in vars(SyncerMetrics(SystemClock())).values():
        if isinstance(metric, MetricWrapperBase):
            kind = "histogram" if isinstance(metric, Histogram) else "counter"
            # The library has no public names for them without a sample.
            name, text, labels = metric._name, metric._documentation, metric._labelnames  # noqa: SLF001 - see above
            yield Family(name, kind, text, tuple(labels))
    for name, (text, labels) in _GAUGES.items():
        yield Family(name, "gauge", text, labels)


def learner_families() -> Iterator[Family]:
    """Yields the metrics of a learner."""
    for name, family, labels in metric_families(Stats()):
        kind = "counter" if family is CounterMetricFamily else "gauge"
        yield Family(f"skerry_learner_{name}", kind, name.replace("_", " "), labels)


def query(family: Family) -> tuple[str, str]:
    """Returns a metric's expression, and the legend of its series."""
    labels = family.labels if "run" in family.labels else (*family.labels, "instance")
    chosen = '{run=~"$run"}' if "run" in family.labels else ""
    by = ", ".join(labels)
    legend = " ".join(f"{{{{{label}}}}}" for label in labels)
    # All replicas of a run count the same.
    combine = "max" if "run" in family.labels else "sum"
    match family.kind:
        case "counter":
            expression = f"{combine} by ({by}) (rate({family.name}_total{chosen}[$__rate_interval]))"
        case "histogram":
            inner = f"{combine} by (le, {by}) (rate({family.name}_bucket{chosen}[$__rate_interval]))"
            expression = f"histogram_quantile(0.99, {inner})"
        case _:
            smallest = "min" if family.name in _SMALLEST else combine
            expression = f"{smallest} by ({by}) ({family.name}{chosen})"
    return expression, legend


def _unit(family: Family) -> str:
    words = family.name.split("_")
    if "bytes" in words:
        return "Bps" if family.kind == "counter" else "bytes"
    if "seconds" in words or "s" in words:
        return "s"
    return "cps" if family.kind == "counter" else "short"


def _title(family: Family) -> str:
    text = family.text.rstrip(".")
    suffix = {"counter": ", a second", "histogram": ", 99 of 100 below"}.get(family.kind, "")
    return text[:1].upper() + text[1:] + suffix


def panels(families: Iterable[Family], *, top: int) -> Iterator[dict[str, Any]]:
    """Yields a panel for each metric, from a line of the board on."""
    for index, family in enumerate(families):
        expression, legend = query(family)
        row, column = divmod(index, _COLUMNS // _WIDTH)
        yield {
            "type": "timeseries",
            "title": _title(family),
            "description": family.name,
            "datasource": {"type": "prometheus", "uid": "${source}"},
            "gridPos": {"x": column * _WIDTH, "y": top + row * _HEIGHT, "w": _WIDTH, "h": _HEIGHT},
            "fieldConfig": {"defaults": {"unit": _unit(family), "min": 0}, "overrides": []},
            "targets": [{"refId": "A", "expr": expression, "legendFormat": legend}],
        }


def board() -> dict[str, Any]:
    """Returns the board as Grafana imports it."""
    syncers = list(syncer_families())
    sections = {
        "Runs": [family for family in syncers if "run" in family.labels],
        "Learners": list(learner_families()),
        "Syncers": [family for family in syncers if "run" not in family.labels],
    }
    shown: list[dict[str, Any]] = []
    top = 0
    for title, families in sections.items():
        shown.append(
            {"type": "row", "title": title, "gridPos": {"x": 0, "y": top, "w": _COLUMNS, "h": 1}, "panels": []}
        )
        shown += panels(families, top=top + 1)
        top += 1 + _HEIGHT * -(-len(families) * _WIDTH // _COLUMNS)
    variables = [
        {"name": "source", "type": "datasource", "query": "prometheus"},
        {
            "name": "run",
            "type": "query",
            "datasource": {"type": "prometheus", "uid": "${source}"},
            "query": "label_values(skerry_log_position, run)",
            "refresh": 2,
            "includeAll": True,
            "multi": True,
        },
    ]
    return {
        "uid": "skerry",
        "title": "Skerry",
        "schemaVersion": 39,
        "refresh": "15s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": variables},
        "panels": [{"id": number, **panel} for number, panel in enumerate(shown, 1)],
    }


if __name__ == "__main__":
    PATH.parent.mkdir(exist_ok=True)
    PATH.write_text(json.dumps(board(), indent=1) + "\n", encoding="utf-8")
    print(f"wrote {PATH}")
