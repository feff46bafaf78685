"""Metrics reach a collector: a real gRPC server of OpenTelemetry's contract, and `skerry serve` as a process."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import click
import grpc
import pytest
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as otlp
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2_grpc as services
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from skerry.runtime.otlp import OtlpSettings, exported, otlp_settings

_PATIENCE_S = 30.0
_ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


class Collector(services.MetricsServiceServicer):
    """Keeps what it receives."""

    def __init__(self) -> None:
        self.received: queue.Queue[Any] = queue.Queue()

    def Export(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802 - the contract's name
        self.received.put(request)
        return otlp.ExportMetricsServiceResponse()

    def next(self) -> tuple[Mapping[str, str], Mapping[str, Any]]:
        """Returns the next request: its resource's attributes, and its metrics by name."""
        (resource,) = self.received.get(timeout=_PATIENCE_S).resource_metrics
        attributes = {item.key: item.value.string_value for item in resource.resource.attributes}
        return attributes, {metric.name: metric for scope in resource.scope_metrics for metric in scope.metrics}


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    """A collector that listens on loopback, and whose address is in the environment."""
    server, collector = grpc.server(ThreadPoolExecutor(1)), Collector()
    register: Any = services.add_MetricsServiceServicer_to_server  # has no types
    register(collector, server)
    monkeypatch.setenv(_ENDPOINT, f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
    server.start()
    yield collector
    server.stop(None).wait()


def labels(point: Any) -> dict[str, str]:
    return {item.key: item.value.string_value for item in point.attributes}


def test_counters_gauges_and_histograms_arrive_at_the_end_as_they_are_scraped(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
    registry = CollectorRegistry()
    deltas = Counter("skerry_deltas", "Deltas.", ["run", "fate"], registry=registry)
    age = Gauge("skerry_age_seconds", "Age.", registry=registry)
    merges = Histogram("skerry_merge_seconds", "Time.", ["run"], registry=registry, buckets=(1, 10))
    with exported(registry, OtlpSettings(_ENDPOINT), service="skerry-test"):
        deltas.labels("demo", "merged").inc(3)
        deltas.labels("demo", "expired").inc()
        age.set(2.5)
        for duration_s in (0.5, 0.75, 5, 50):
            merges.labels("demo").observe(duration_s)
    resource, metrics = collector.next()
    assert resource["service.name"] == "skerry-test"
    assert resource["deployment.environment"] == "test"
    total = metrics["skerry_deltas"].sum
    assert total.is_monotonic
    assert total.aggregation_temporality == 2  # cumulative
    assert {labels(point)["fate"]: point.as_double for point in total.data_points} == {"merged": 3, "expired": 1}
    assert [point.as_double for point in metrics["skerry_age_seconds"].gauge.data_points] == [2.5]
    (point,) = metrics["skerry_merge_seconds"].histogram.data_points
    assert (labels(point), point.count, point.sum) == ({"run": "demo"}, 4, 56.25)
    assert (list(point.explicit_bounds), list(point.bucket_counts)) == ([1, 10], [2, 1, 1])
    assert not point.HasField("max")
    assert 0 < point.start_time_unix_nano <= point.time_unix_nano


def test_a_collector_that_takes_http_is_sent_to_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    received: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    registry = CollectorRegistry()
    Gauge("skerry_runs", "Runs.", registry=registry).set(4)
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv(_ENDPOINT, f"http://127.0.0.1:{server.server_port}")
        with exported(registry, OtlpSettings(_ENDPOINT, "http/protobuf"), service="skerry-test"):
            pass
        server.shutdown()
    (request,) = map(otlp.ExportMetricsServiceRequest.FromString, received)
    assert request.resource_metrics[0].scope_metrics[0].metrics[0].gauge.data_points[0].as_double == 4


def test_a_syncer_sends_what_it_serves_while_it_runs_and_when_it_ends(collector: Collector, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "skerry.cli", "serve", "--new-store", "--listen", "127.0.0.1:0"]
    variables = {**os.environ, "OTEL_METRIC_EXPORT_INTERVAL": "100", "OTEL_SERVICE_NAME": "syncer-of-a-test"}
    with subprocess.Popen(command, cwd=tmp_path, env=variables) as process:
        resource, metrics = collector.next()
        process.terminate()
        assert process.wait(_PATIENCE_S) == 0
    assert resource["service.name"] == "syncer-of-a-test"
    assert {"skerry_runs", "skerry_event_loop_lag_seconds", "skerry_store_call_duration_seconds"} <= metrics.keys()


def test_without_the_extra_a_syncer_says_what_to_install_and_serves(tmp_path: Path) -> None:
    program = "import sys; sys.modules['opentelemetry'] = None; from skerry.cli.main import main; main()"
    command = [sys.executable, "-c", program, "serve", "--new-store", "--listen", "127.0.0.1:0"]
    variables = {**os.environ, _ENDPOINT: "http://127.0.0.1:4317"}
    with subprocess.Popen(
        command, cwd=tmp_path, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("listening on 127.0.0.1:")
        process.terminate()
        _, log = process.communicate(timeout=_PATIENCE_S)
    (line,) = [line for line in log.splitlines() if _ENDPOINT in line]
    assert "pip install 'skerry[otel]'" in line
    assert "Traceback" not in log


def test_a_collector_that_is_away_does_not_keep_a_process_from_ending(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(_ENDPOINT, "http://127.0.0.1:1")
    monkeypatch.setattr("skerry.runtime.otlp._LAST_S", 0.2)
    with exported(CollectorRegistry(), OtlpSettings(_ENDPOINT), service="skerry-test"):
        pass  # a hang is the suite's time-out


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {_ENDPOINT: ""},
        {_ENDPOINT: "http://collector:4317", "OTEL_SDK_DISABLED": "True"},
        {_ENDPOINT: "http://collector:4317", "OTEL_METRICS_EXPORTER": "none"},
    ],
)
def test_nothing_is_sent_unless_opentelemetrys_variables_ask_for_it(variables: dict[str, str]) -> None:
    assert otlp_settings(variables) is None


def test_the_variables_of_metrics_have_precedence() -> None:
    variables = {
        _ENDPOINT: "http://collector:4317",
        "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://metrics:4318/v1/metrics",
        "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
        "OTEL_EXPORTER_OTLP_METRICS_PROTOCOL": "http/protobuf",
        "OTEL_METRIC_EXPORT_INTERVAL": "500",
    }
    assert otlp_settings(variables) == OtlpSettings("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "http/protobuf", 0.5)


@pytest.mark.parametrize("wrong", [{"OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"}, {"OTEL_METRIC_EXPORT_INTERVAL": "0"}])
def test_a_value_that_can_not_be_right_is_refused_and_named(wrong: dict[str, str]) -> None:
    with pytest.raises(click.UsageError, match=next(iter(wrong))):
        otlp_settings({_ENDPOINT: "http://collector:4317", **wrong})
