"""Sends a process's metrics to an OpenTelemetry collector (OTLP): those that `exposition` serves, under their names.

OpenTelemetry's own variables say where to and how. Its exporter sends, so it knows all of them (headers, certificates,
timeouts). gRPC's plugin for OpenTelemetry, grpcio-observability, is no alternative: its exporting thread holds a lock
while it waits for the interpreter, and under load a `grpc.aio` process deadlocks within seconds (seen with 1.85.0).
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from itertools import pairwise
from typing import Any, Final

import click
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from skerry.runtime.clock import SystemClock
from skerry.runtime.logs import get_logger

_LOG: Final = get_logger(__name__)
_ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS: Final = ("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_EXPORTERS: Final = {
    "grpc": "opentelemetry.exporter.otlp.proto.grpc.metric_exporter",
    "http/protobuf": "opentelemetry.exporter.otlp.proto.http.metric_exporter",
}
# How long the end of a process waits for its last figures to arrive.
_LAST_S: Final = 5.0


@dataclass(frozen=True)
class OtlpSettings:
    """How metrics are sent; where to, the exporter finds out."""

    variable: str  # that asks for it
    protocol: str = "grpc"  # a key of _EXPORTERS
    interval_s: float = 60.0


def otlp_settings(variables: Mapping[str, str]) -> OtlpSettings | None:
    """Returns what the environment's variables ask for; None: nothing is to be sent.

    Raises:
        click.UsageError: one of them has a value that it can't have.
    """
    variable = next((name for name in _ENDPOINTS if variables.get(name)), None)
    is_disabled = variables.get("OTEL_SDK_DISABLED", "").lower() == "true"
    if variable is None or is_disabled or "otlp" not in variables.get("OTEL_METRICS_EXPORTER", "otlp").split(","):
        return None
    protocol = next((variables[name] for name in _PROTOCOLS if variables.get(name)), "grpc")
    if protocol not in _EXPORTERS:
        raise click.UsageError(f"{' or '.join(_PROTOCOLS)} must be one of {', '.join(_EXPORTERS)}. protocol={protocol}")
    interval = variables.get("OTEL_METRIC_EXPORT_INTERVAL") or "60000"
    if not interval.isdecimal() or not int(interval):
        raise click.UsageError(f"OTEL_METRIC_EXPORT_INTERVAL must be milliseconds. interval={interval}")
    return OtlpSettings(variable, protocol, int(interval) / 1e3)


@contextmanager
def exported(metrics: Collector, settings: OtlpSettings | None, *, service: str) -> Iterator[None]:
    """Sends `metrics` at each interval while the context lasts, and at its end; they are collected on another thread.

    `service` is OpenTelemetry's `service.name`, unless its variables give one. Without `settings` nothing is sent, nor
    without the extra [otel], which is then logged.
    """
    if settings is None:
        yield
        return
    try:
        exporter = import_module(_EXPORTERS[settings.protocol]).OTLPMetricExporter()
        converter = _Converter(service)
    except ModuleNotFoundError as error:
        _LOG.warning(
            f"{settings.variable} is set, but no metrics are sent: run `pip install 'skerry[otel]'`", missing=error.name
        )
        yield
        return
    is_told = threading.Event()

    def send() -> None:
        is_last = False
        while not is_last:
            is_last = is_told.wait(settings.interval_s)
            try:
                exporter.export(converter.converted(metrics.collect()))
            except Exception:  # noqa: BLE001 - no figures are worth a process
                _LOG.warning("metrics were not sent", exc_info=True)

    thread = threading.Thread(target=send, name="skerry-otlp", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_told.set()
        thread.join(_LAST_S)
        exporter.shutdown()  # ends what is being tried again


class _Converter:
    """Makes OpenTelemetry's metrics of Prometheus'. Counts begin when a metric was made, or else with this object."""

    def __init__(self, service: str) -> None:
        """Reads OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME.

        Raises:
            ModuleNotFoundError: the SDK is not installed.
        """
        self._sdk: Any = import_module("opentelemetry.sdk.metrics.export")
        resources = import_module("opentelemetry.sdk.resources")
        instrumentation = import_module("opentelemetry.sdk.util.instrumentation")
        # Of several processes that send the same series, each needs an instance of its own.
        own = {"service.name": service, "service.instance.id": f"{socket.gethostname()}:{os.getpid()}"}
        self._resource = resources.Resource(own).merge(resources.OTELResourceDetector().detect())
        self._scope = instrumentation.InstrumentationScope("skerry")
        self._clock = SystemClock()
        self._began_s = self._clock.unix_s()

    def converted(self, families: Iterable[Metric]) -> Any:
        """Returns `opentelemetry.sdk.metrics.export.MetricsData`."""
        now_ns = int(1e9 * self._clock.unix_s())
        points = [(family, self._data(family, now_ns)) for family in families]
        metrics = [
            self._sdk.Metric(family.name, family.documentation, family.unit, data) for family, data in points if data
        ]
        scope = self._sdk.ScopeMetrics(self._scope, metrics, schema_url="")
        return self._sdk.MetricsData([self._sdk.ResourceMetrics(self._resource, [scope], schema_url="")])

    def _data(self, family: Metric, now_ns: int) -> Any:
        """Returns a family's points; None if it has none, or is of a kind that OpenTelemetry has not."""
        series = _series(family)
        if not series or family.type not in {"counter", "gauge", "histogram"}:
            return None
        points = [
            self._histogram(values, now_ns)
            if family.type == "histogram"
            else self._sdk.NumberDataPoint(values.labels, self._start_ns(values), now_ns, values.value)
            for values in series
        ]
        if family.type == "gauge":
            return self._sdk.Gauge(points)
        cumulative = self._sdk.AggregationTemporality.CUMULATIVE
        if family.type == "histogram":
            return self._sdk.Histogram(points, cumulative)
        return self._sdk.Sum(points, cumulative, is_monotonic=True)

    def _histogram(self, values: _Values, now_ns: int) -> Any:
        bounds = sorted(values.buckets)
        counts = [int(upper - lower) for lower, upper in pairwise([0, *(values.buckets[bound] for bound in bounds)])]
        return self._sdk.HistogramDataPoint(
            attributes=values.labels,
            start_time_unix_nano=self._start_ns(values),
            time_unix_nano=now_ns,
            count=sum(counts),
            sum=values.value,
            bucket_counts=counts,
            explicit_bounds=bounds[:-1],  # the last one is infinite
            min=None,  # not known
            max=None,
        )

    def _start_ns(self, values: _Values) -> int:
        return int(1e9 * (values.created_s or self._began_s))


@dataclass
class _Values:
    """A series of a family: its value, or its sum and its buckets, each of which counts what is at most its bound."""

    labels: dict[str, str]
    value: float = 0.0
    created_s: float = 0.0
    buckets: dict[float, float] = field(default_factory=dict)


def _series(family: Metric) -> list[_Values]:
    series: dict[tuple[tuple[str, str], ...], _Values] = {}
    for sample in family.samples:
        labels = {name: value for name, value in sample.labels.items() if name != "le"}
        values = series.setdefault(tuple(sorted(labels.items())), _Values(labels))
        match sample.name.removeprefix(family.name):
            case "_created":
                values.created_s = sample.value
            case "_bucket":
                values.buckets[float(sample.labels["le"])] = sample.value
            case "" | "_total" | "_sum":
                values.value = sample.value
            case _:  # a histogram's count is that of its last bucket
                pass
    return list(series.values())
