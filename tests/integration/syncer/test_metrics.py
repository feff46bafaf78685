"""What Prometheus finds: a scrape of a real server and of a real learner, and the names that alerts ask for."""

from __future__ import annotations

import asyncio
import re
import urllib.request
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import click
import grpc
import pytest
from click.testing import CliRunner
from google.protobuf.duration_pb2 import Duration
from prometheus_client.parser import text_string_to_metric_families

from skerry import ArrayLearner, PoisonedError, Stats
from skerry.cli.main import cli
from skerry.runtime.clock import SystemClock
from skerry.runtime.exposition import exposed
from skerry.v1 import runs_pb2 as runs
from skerry.v1 import types_pb2 as types
from skerry_learner.command import learn
from skerry_learner.exposition import LearnerMetrics
from skerry_syncer.command import serve
from skerry_syncer.run.metrics import _GAUGES, MeasuredObjects, SyncerMetrics
from skerry_syncer.server import SyncerServer, serving
from skerry_syncer.store.errors import ObjectExistsError, ObjectMissingError, StoreFullError
from skerry_syncer.store.objects.interface import Objects
from skerry_syncer.store.objects.opening import open_objects
from tests.integration.syncer.conftest import LOCAL
from tests.support.faulty_objects import NO_FAULT, Effect, Fault, FaultyObjects, LateWrites
from tests.support.quadratic import QUICK, Quadratic, train_until
from tests.support.raw_learner import attached, commit, connected, create_draft, create_run, layout, refused

ALERTS = Path(__file__).parents[3] / "docker" / "alerts.yml"


POLICY = types.Policy(inner_step_count=4, grace_factor=0.0, quorum_count=1, lease_term=Duration(seconds=600))


class Samples(dict[tuple[str, frozenset[str]], float]):
    """Values by name and the values of labels: `samples("skerry_version", "demo", "body")`."""

    def __call__(self, name: str, *labels: str) -> float:
        return self[name, frozenset(labels)]


def known_labels() -> dict[str, frozenset[str]]:
    """Returns the labels of each of the syncer's metrics, under the name that a query uses."""
    counted = [metric for metric in vars(SyncerMetrics(SystemClock())).values() if hasattr(metric, "_labelnames")]
    found = {
        metric._name + ("_total" if metric._type == "counter" else ""): frozenset(metric._labelnames)
        for metric in counted
    }
    return found | {name: frozenset(labels) for name, (_, labels) in _GAUGES.items()}


class Resting:
    """A learner before its first step."""

    stats = Stats(versions={"body": 0})
    progress = None
    failure = None


_ALERTS = re.split(r"- alert: ", ALERTS.read_text("utf-8"))[1:]


@pytest.mark.parametrize("alert", [pytest.param(text, id=text.split()[0]) for text in _ALERTS])
def test_an_alert_names_metrics_labels_and_commands_that_exist(alert: str) -> None:
    expression, _, texts = alert.partition("annotations:")
    known = {"up": frozenset({"job", "instance"})} | known_labels()
    labels = {"instance", "le"}
    for name, matchers in re.findall(r"\b(skerry_\w+?|up)(?:_bucket)?\b(?:\{([^}]*)\})?", expression):
        labels |= known[name]
        assert set(re.findall(r'(\w+)="', matchers)) <= known[name]
    kept = [set(found.replace(",", " ").split()) for found in re.findall(r"\bby \(([^)]*)\)", expression)] or [labels]
    assert set().union(*kept) <= labels
    assert set(re.findall(r"\$labels\.(\w+)", texts)) <= set.intersection(*kept) - {"le"}
    for line in re.findall(r"`skerry ([^`]*)`", texts):
        words = re.sub(r"\{\{[^}]*\}\}", "fit", line).split()
        name, command, rest = cli.resolve_command(click.Context(cli, info_name="skerry"), words)
        assert command is not None
        command.make_context(name, rest)


async def scraped(url: str) -> Samples:
    """Returns the samples of Skerry's names."""
    answer = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=20).read().decode())
    samples = Samples()
    for family in text_string_to_metric_families(answer):
        for sample in family.samples:
            if family.name.startswith("skerry_") and not sample.name.endswith("_created"):
                samples[sample.name, frozenset(sample.labels.values())] = sample.value
    return samples


@pytest.fixture
async def watched(store_url: str) -> AsyncIterator[SyncerServer]:
    async with serving(open_objects(store_url), replace(LOCAL, metrics="127.0.0.1:0")) as server:
        yield server


async def test_a_scrape_of_a_server_tells_what_its_runs_do(watched: SyncerServer) -> None:
    before = await scraped(watched.metrics_url)
    assert before("skerry_runs") == 0
    assert before("skerry_part_budget_bytes") == LOCAL.host.in_flight_bytes
    async with connected(watched.port) as stubs:
        run, _ = await create_run(stubs, policy=POLICY)
        await (await attached(stubs, run)).advance()
        with refused("RUN_NOT_FOUND", grpc.StatusCode.NOT_FOUND):
            await stubs.runs.GetRun(runs.GetRunRequest(name="other"))
        after = await scraped(watched.metrics_url)
    assert after("skerry_runs") == 1
    assert after("skerry_version", "demo", "body") == 1
    assert after("skerry_versions_total", "demo") == 1
    # The initial weights of each fragment are pushed as deltas too.
    assert after("skerry_deltas_accepted_total", "demo") == 1 + len(run.fragments)
    assert after("skerry_deltas_decided_total", "demo", "merged", "") >= 1
    assert after("skerry_learners", "demo", "live") == 1
    assert after("skerry_learners", "demo", "participating") == 1
    assert after("skerry_log_position", "demo") >= 3
    assert 0 <= after("skerry_version_age_seconds", "demo") < 60
    assert after("skerry_rounds_open", "demo") == 0
    assert after("skerry_merge_duration_seconds_count", "demo") == 1
    assert after("skerry_rpc_refusals_total", "Runs/GetRun", "RUN_NOT_FOUND") == 1
    assert after("skerry_rpc_received_bytes_total", "Exchange/PushDelta") > layout("body").numel // 2
    assert after("skerry_rpc_sent_bytes_total", "Exchange/PullFragment") > 4 * layout("body").numel
    assert after("skerry_store_call_duration_seconds_count", "create") >= 3
    async with asyncio.timeout(10):  # the lag is measured once in a while
        while (await scraped(watched.metrics_url))("skerry_event_loop_lag_seconds_count") < 1:
            await asyncio.sleep(0.1)


async def test_another_creators_draft_says_nothing_of_the_run_that_got_the_name(watched: SyncerServer) -> None:
    async with connected(watched.port) as stubs:
        await create_draft(stubs, policy=POLICY)
        late, _ = await create_draft(stubs, seed=1, policy=POLICY)
        run, _ = await create_run(stubs, policy=POLICY)
        await (await attached(stubs, run)).advance()
        with refused("RUN_EXISTS", grpc.StatusCode.ALREADY_EXISTS):
            await commit(stubs, late)
        found = await scraped(watched.metrics_url)
    assert found("skerry_runs") == 2
    assert found("skerry_learners", "demo", "live") == 1
    assert found("skerry_version", "demo", "body") == 1
    assert found("skerry_versions_total", "demo") == 1


async def test_a_failing_store_is_counted_and_its_answers_are_not() -> None:
    clock = SystemClock()
    metrics = SyncerMetrics(clock)
    faulty = FaultyObjects(open_objects("memory://"), lambda *_: NO_FAULT, clock=clock, late=LateWrites())
    objects: Objects = MeasuredObjects(faulty, metrics, clock)
    await objects.create("a", b"1")
    with pytest.raises(ObjectExistsError):
        await objects.create("a", b"2")
    with pytest.raises(ObjectMissingError):
        await objects.get("b")
    assert _counted(metrics, "skerry_store_errors_total") == {}
    assert [piece async for piece in objects.stream("a")] == [b"1"]
    assert [info.name async for info in objects.list("")] == ["a"]
    faulty.schedule = lambda *_: Fault(Effect.ERROR_BEFORE, StoreFullError)
    with pytest.raises(StoreFullError):
        await objects.write("c", b"3")
    assert _counted(metrics, "skerry_store_errors_total") == {("write", "STORE_FULL"): 1}
    calls = _counted(metrics, "skerry_store_call_duration_seconds_count")
    assert calls == {("create",): 2, ("get",): 1, ("stream",): 1, ("list",): 1, ("write",): 1}


def _counted(metrics: SyncerMetrics, name: str) -> dict[tuple[str, ...], float]:
    samples = [sample for metric in metrics.registry.collect() for sample in metric.samples if sample.name == name]
    return {tuple(sample.labels.values()): sample.value for sample in samples if sample.value}


async def test_a_scrape_of_a_learner_tells_what_it_exchanges(server: SyncerServer) -> None:
    samples = await asyncio.to_thread(_learner_samples, f"127.0.0.1:{server.port}")
    us = ("fit", "us")
    assert samples("skerry_learner_steps_total", *us) >= QUICK.inner_step_count
    assert samples("skerry_learner_deltas_merged_total", *us) >= 1
    assert samples("skerry_learner_sent_bytes_total", *us) > 0
    assert samples("skerry_learner_attached", *us) == 1
    assert samples("skerry_learner_stopped", *us, "") == 0


def test_what_was_not_merged_has_its_cause_for_a_label() -> None:
    stats = Stats(causes={"quarantined: norm is an outlier": 30}, problem=PoisonedError("QUARANTINED", "delta"))
    learner = SimpleNamespace(stats=stats, progress=None, failure=None)
    metrics = LearnerMetrics(cast("Any", learner), run="fit", learner_id="us").collect()
    values = {(sample.name, *sample.labels.values()): sample.value for metric in metrics for sample in metric.samples}
    assert values["skerry_learner_deltas_not_merged_total", "fit", "us", "quarantined: norm is an outlier"] == 30
    assert values["skerry_learner_problem", "fit", "us", "QUARANTINED"] == 1


def _learner_samples(target: str) -> Samples:
    problem = Quadratic()
    with ArrayLearner(problem.arrays, target=target, run="fit", learner_id="us", create=True, policy=QUICK) as learner:
        train_until([(problem, learner)], lambda: min(learner.stats.versions.values()) >= 1)
        with exposed(LearnerMetrics(learner, run="fit", learner_id="us"), "127.0.0.1:0") as url:
            return asyncio.run(scraped(url))


@pytest.mark.parametrize(
    ("command", "options", "says"),
    [
        (serve, ["--metrics", "9464"], "HOST:PORT"),
        (learn, ["--metrics", "127.0.0.1:0", "--alone"], "--alone has none"),
    ],
)
def test_a_wrong_address_for_metrics_is_refused(command: Any, options: Iterable[str], says: str) -> None:
    result = CliRunner().invoke(command, list(options))
    assert result.exit_code == 2
    assert says in result.output


def test_a_taken_port_for_metrics_is_said_under_its_option(tmp_path: Path) -> None:
    with exposed(LearnerMetrics(cast("Any", Resting()), run="fit", learner_id="us"), "127.0.0.1:0") as url:
        address = url.removeprefix("http://").removesuffix("/metrics")
        options = ["--listen", "127.0.0.1:0", "--metrics", address, "--store", (tmp_path / "store").as_uri()]
        result = CliRunner().invoke(serve, options)
    assert result.exit_code == 2
    assert "--metrics" in result.output
