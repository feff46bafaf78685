"""What Prometheus finds: a scrape of a real server, a learner's metrics, and the names that alerts ask for."""

from __future__ import annotations

import asyncio
import re
import urllib.request
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import click
import grpc
import pytest

from skerry import PoisonedError, Stats
from skerry.cli.main import cli
from skerry.runtime.clock import SystemClock
from skerry.v1 import runs_pb2 as runs
from skerry_learner.exposition import LearnerMetrics
from skerry_syncer.run.metrics import _GAUGES, MeasuredObjects, SyncerMetrics
from skerry_syncer.server import serving
from skerry_syncer.store.errors import ObjectExistsError, ObjectMissingError, StoreFullError
from skerry_syncer.store.objects.interface import Objects
from skerry_syncer.store.objects.opening import open_objects
from tests.integration.syncer.conftest import LOCAL
from tests.support.hooked_objects import HookedObjects
from tests.support.raw_learner import (
    LONG,
    attached,
    commit,
    connected,
    create_draft,
    create_run,
    layout,
    quick,
    refused,
)

ALERTS = Path(__file__).parents[3] / "docker" / "alerts.yml"


def known_labels() -> dict[str, frozenset[str]]:
    """Returns the labels of each of the syncer's metrics, under the name that a query uses."""
    counted = [metric for metric in vars(SyncerMetrics(SystemClock())).values() if hasattr(metric, "_labelnames")]
    labels = {
        metric._name + ("_total" if metric._type == "counter" else ""): frozenset(metric._labelnames)
        for metric in counted
    }
    return labels | {name: frozenset(names) for name, (_, names) in _GAUGES.items()}


_ALERTS = re.split(r"- alert: ", ALERTS.read_text("utf-8"))[1:]


@pytest.mark.parametrize("alert", [pytest.param(text, id=text.split()[0]) for text in _ALERTS])
def test_an_alert_names_metrics_labels_and_commands_that_exist(alert: str) -> None:
    expression, _, texts = alert.partition("annotations:")
    known = {"up": frozenset({"job", "instance"})} | known_labels()
    labels = {"instance", "le"}
    for name, matchers in re.findall(r"\b(skerry_\w+?|up)(?:_bucket)?\b(?:\{([^}]*)\})?", expression):
        labels |= known[name]
        assert set(re.findall(r'(\w+)="', matchers)) <= known[name]
    kept = [set(names.replace(",", " ").split()) for names in re.findall(r"\bby \(([^)]*)\)", expression)] or [labels]
    assert set().union(*kept) <= labels
    assert set(re.findall(r"\$labels\.(\w+)", texts)) <= set.intersection(*kept) - {"le"}
    for line in re.findall(r"`skerry ([^`]*)`", texts):
        words = re.sub(r"\{\{[^}]*\}\}", "fit", line).split()
        name, command, rest = cli.resolve_command(click.Context(cli, info_name="skerry"), words)
        assert command is not None
        command.make_context(name, rest)


async def scraped(url: str) -> dict[str, float]:
    """Returns the samples by their names and labels."""
    answer = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=20).read().decode())
    samples = (line.rpartition(" ") for line in answer.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in samples}


async def test_a_scrape_of_a_server_tells_what_its_runs_do_and_nothing_of_drafts(store_url: str) -> None:
    policy = quick(lease_term=LONG)
    async with (
        serving(open_objects(store_url), replace(LOCAL, metrics="127.0.0.1:0")) as server,
        connected(server.port) as stubs,
    ):
        assert (await scraped(server.metrics_url))["skerry_runs"] == 0
        late, _ = await create_draft(stubs, seed=1, policy=policy)
        run, _ = await create_run(stubs, policy=policy)
        await (await attached(stubs, run)).advance()
        with refused("RUN_EXISTS", grpc.StatusCode.ALREADY_EXISTS):
            await commit(stubs, late)
        with refused("RUN_NOT_FOUND", grpc.StatusCode.NOT_FOUND):
            await stubs.runs.GetRun(runs.GetRunRequest(name="other"))
        samples = await scraped(server.metrics_url)
        async with asyncio.timeout(10):  # the lag is measured once in a while
            while (await scraped(server.metrics_url))["skerry_event_loop_lag_seconds_count"] < 1:
                await asyncio.sleep(0.1)
    assert samples['skerry_version{fragment="body",run="demo"}'] == 1
    assert samples['skerry_versions_total{run="demo"}'] == 1
    assert samples['skerry_deltas_decided_total{fate="merged",reason="",run="demo"}'] >= 1
    assert samples['skerry_learners{run="demo",state="live"}'] == 1
    assert samples['skerry_learners{run="demo",state="participating"}'] == 1
    assert samples['skerry_log_position{run="demo"}'] >= 3
    assert 0 <= samples['skerry_version_age_seconds{run="demo"}'] < 60
    assert samples['skerry_rounds_open{run="demo"}'] == 0
    assert samples['skerry_merge_duration_seconds_count{run="demo"}'] == 1
    assert samples['skerry_rpc_refusals_total{method="Runs/GetRun",reason="RUN_NOT_FOUND"}'] == 1
    assert samples['skerry_rpc_received_bytes_total{method="Exchange/PushDelta"}'] > layout("body").numel // 2
    assert samples['skerry_rpc_sent_bytes_total{method="Exchange/PullFragment"}'] > 4 * layout("body").numel
    assert samples['skerry_store_call_duration_seconds_count{operation="create"}'] >= 3


async def test_a_failing_store_is_counted_and_its_answers_are_not() -> None:
    metrics = SyncerMetrics(SystemClock())
    full = HookedObjects()

    async def fail() -> None:
        raise StoreFullError("store is full")

    full.hooks["before write", ""] = fail
    objects: Objects = MeasuredObjects(full, metrics)
    await objects.create("a", b"1")
    with pytest.raises(ObjectExistsError):
        await objects.create("a", b"2")
    with pytest.raises(ObjectMissingError):
        await objects.get("b")
    assert [piece async for piece in objects.stream("a")] == [b"1"]
    assert [info.name async for info in objects.list("")] == ["a"]
    with pytest.raises(StoreFullError):
        await objects.write("c", b"3")
    samples = [sample for metric in metrics.registry.collect() for sample in metric.samples if sample.value]
    counts = {(sample.name, *sample.labels.values()): sample.value for sample in samples}
    errors = {key: value for key, value in counts.items() if key[0] == "skerry_store_errors_total"}
    assert errors == {("skerry_store_errors_total", "write", "STORE_FULL"): 1}
    calls = {"create": 2, "get": 1, "stream": 1, "list": 1, "write": 1}
    assert {name: counts["skerry_store_call_duration_seconds_count", name] for name in calls} == calls


def test_a_learners_metrics_have_its_counts_and_the_cause_of_what_was_not_merged() -> None:
    stats = Stats(
        step_count=9,
        is_attached=True,
        versions={"body": 3},
        causes={"quarantined: norm is an outlier": 30},
        problem=PoisonedError("QUARANTINED", "delta"),
    )
    metrics = LearnerMetrics(cast("Any", SimpleNamespace(stats=stats)), run="fit", learner_id="us").collect()
    values = {(sample.name, *sample.labels.values()): sample.value for metric in metrics for sample in metric.samples}
    assert values["skerry_learner_step_count", "fit", "us"] == 9
    assert values["skerry_learner_is_attached", "fit", "us"] == 1
    assert values["skerry_learner_versions", "fit", "us", "body"] == 3
    assert values["skerry_learner_causes_total", "fit", "us", "quarantined: norm is an outlier"] == 30
    assert values["skerry_learner_problem", "fit", "us", "QUARANTINED"] == 1
    assert not {"skerry_learner_failure", "skerry_learner_loss"} & {name for name, *_ in values}
