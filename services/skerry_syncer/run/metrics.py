"""The metrics that a syncer serves to Prometheus; docs/operating.md has the main ones.

Counters and histograms are updated where events happen. Values that the process holds anyway are read at each scrape. A
counter of a run counts entries of its log that this replica folded, so every replica of a run counts the same.

Labels are names of runs, fragments, methods, operations and reasons: their number is bounded by what a replica serves.
Learners have no label here; each serves its own metrics (`skerry learn --metrics`).
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.core import GaugeMetricFamily, Metric

from skerry.runtime.clock import Clock
from skerry_syncer.rounds.membership import participants
from skerry_syncer.run.parts import ByteBudget
from skerry_syncer.run.replica import RunReplica
from skerry_syncer.store.errors import StoreFullError, StoreUnavailableError
from skerry_syncer.store.log.entries import AcceptedItem, ClosedItem, CommittedItem, Entry, MetricsItem, RunStatus
from skerry_syncer.store.log.state import Outcome
from skerry_syncer.store.objects.interface import Objects

# If the event loop has not answered by then, the scrape fails, which is an alert of its own.
_SCRAPE_TIMEOUT_S: Final = 8.0
# Time between two measurements of how late the event loop is.
_LAG_EVERY_S: Final = 0.25

_GAUGES: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    "skerry_runs": ("Runs that this process has open.", ()),
    "skerry_part_budget_bytes": ("Memory for parts and pieces in flight.", ()),
    "skerry_part_budget_used_bytes": ("Memory that they hold now.", ()),
    "skerry_log_position": ("Position of the newest folded entry.", ("run",)),
    "skerry_version": ("The newest version of a fragment.", ("run", "fragment")),
    "skerry_version_age_seconds": ("Time since any fragment had a new version.", ("run",)),
    "skerry_round_length_seconds": ("Time that H inner steps take.", ("run",)),
    "skerry_rounds_open": ("Rounds that gather deltas.", ("run",)),
    "skerry_round_age_seconds": ("Age of the oldest open round.", ("run",)),
    "skerry_learners": ("Learners with a lease, and those of them that contribute.", ("run", "state")),
}
_Samples = Iterator[tuple[str, tuple[str, ...], float]]  # name, labels, value


class SyncerMetrics:
    """The metrics of one process. Everything belongs to the event loop."""

    def __init__(self, clock: Clock) -> None:
        """Measures ages by `clock`. Nothing is served yet."""
        self.registry = registry = CollectorRegistry()
        self.budget: ByteBudget | None = None
        self._clock = clock
        self._followed: dict[RunReplica, _Followed] = {}
        counter, histogram = partial(Counter, registry=registry), partial(Histogram, registry=registry)
        self.received_bytes = counter("skerry_rpc_received_bytes", "Bytes of requests.", ["method"])
        self.sent_bytes = counter("skerry_rpc_sent_bytes", "Bytes of responses.", ["method"])
        self.refusals = counter("skerry_rpc_refusals", "Calls that ended with an error.", ["method", "reason"])
        self.store_calls = histogram(
            "skerry_store_call_duration_seconds",
            "Time of calls to the object store.",
            ["operation"],
            buckets=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 60),
        )
        self.store_errors = counter(
            "skerry_store_errors", "Calls that the store did not carry out.", ["operation", "reason"]
        )
        self.loop_lag = histogram(
            "skerry_event_loop_lag_seconds",
            "Delay of a timer.",
            buckets=(0.001, 0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5),
        )
        self.versions = counter("skerry_versions", "Versions committed.", ["run"])
        self.accepted = counter("skerry_deltas_accepted", "Deltas accepted.", ["run"])
        self.decided = counter("skerry_deltas_decided", "Deltas with a final fate.", ["run", "fate", "reason"])
        self.gate_failures = counter("skerry_gate_failures", "Reports of a judge that failed the run's gate.", ["run"])
        self.merges = histogram(
            "skerry_merge_duration_seconds",
            "Time from a round's close to its version.",
            ["run"],
            buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300),
        )
        ProcessCollector(registry=registry)
        registry.register(self)

    def opened(self, replica: RunReplica) -> None:
        """Follows a run that this process serves from now on."""
        self._followed[replica] = _Followed(replica, self)

    def closed(self, replica: RunReplica) -> None:
        """Drops all that is known of a run that this process no longer serves."""
        followed = self._followed.pop(replica, None)
        if followed is not None:
            followed.unsubscribe()
            if all(other.run != followed.run for other in self._followed.values()):
                for metric in (self.versions, self.accepted, self.decided, self.gate_failures, self.merges):
                    metric.remove_by_labels({"run": followed.run})

    async def watch_lag(self) -> None:
        """Measures for ever how late the event loop is."""
        while True:
            began_s = self._clock.monotonic_s()
            await self._clock.sleep(_LAG_EVERY_S)
            self.loop_lag.observe(max(0.0, self._clock.monotonic_s() - began_s - _LAG_EVERY_S))

    def collect(self) -> Iterator[Metric]:
        """Yields what is read when it is asked for; the registry calls it."""
        families = {
            name: GaugeMetricFamily(name, documentation, labels=labels)
            for name, (documentation, labels) in _GAUGES.items()
        }
        for name, labels, value in self._samples():
            families[name].add_metric(labels, value)
        yield from families.values()

    def _samples(self) -> _Samples:
        yield "skerry_runs", (), len(self._followed)
        if self.budget is not None:
            yield "skerry_part_budget_bytes", (), self.budget.limit_bytes
            yield "skerry_part_budget_used_bytes", (), self.budget.used_bytes
        # Several open runs may have one name; a committed run is shown instead of a draft.
        followed = sorted(self._followed.items(), key=lambda item: item[0].state.status is not RunStatus.DRAFT)
        for _, run in sorted({run.run: run for _, run in followed}.items()):
            yield from run.samples()


class _Followed:
    """One open run: counts what its log decides, and reads its gauges."""

    def __init__(self, replica: RunReplica, metrics: SyncerMetrics) -> None:
        self.run = replica.log.spec.name
        self._replica = replica
        self._metrics = metrics
        self._clock = replica.log.clock
        self._version_at_s = self._clock.monotonic_s()
        self._closed_at_s: dict[str, float] = {}  # by fragment, of the rounds that are merged now
        metrics.gate_failures.labels(self.run)  # from 0, so that the first failure is an increase
        self.unsubscribe = replica.log.subscribe(self.on_entry)

    def on_entry(self, _entry: Entry, outcomes: tuple[Outcome, ...]) -> None:
        """Counts what an entry's admitted items did."""
        now_s = self._clock.monotonic_s()
        for outcome in outcomes:
            if outcome.rejection is not None:
                continue
            match outcome.item:
                case AcceptedItem():
                    self._metrics.accepted.labels(self.run).inc()
                case ClosedItem(fragment=fragment):
                    self._closed_at_s[fragment] = now_s
                case CommittedItem(fragment=fragment):
                    self._metrics.versions.labels(self.run).inc()
                    self._version_at_s = now_s
                    if (closed_at_s := self._closed_at_s.pop(fragment, None)) is not None:
                        self._metrics.merges.labels(self.run).observe(now_s - closed_at_s)
                case MetricsItem(request_id=request_id):
                    report = self._replica.state.reports.get(request_id)
                    if report is not None and report.better_position:
                        self._metrics.gate_failures.labels(self.run).inc()
                case _:
                    pass
            for delta in outcome.decided:
                self._metrics.decided.labels(self.run, delta.fate.value, delta.short_reason).inc()

    def samples(self) -> _Samples:
        """Yields the samples of the run's gauges."""
        run, state, now_s = self.run, self._replica.state, self._clock.monotonic_s()
        yield "skerry_log_position", (run,), state.position
        for name, fragment in sorted(state.fragments.items()):
            yield "skerry_version", (run, name), fragment.version
        if state.status is RunStatus.OPEN:
            yield "skerry_version_age_seconds", (run,), now_s - self._version_at_s
        live = self._replica.view().live
        steps_s = [report.step_time_s for report in live.values() if report.step_time_s]
        if steps_s:
            yield "skerry_round_length_seconds", (run,), state.policy.inner_step_count * statistics.median(steps_s)
        ages_s = [now_s - opened_at_s for opened_at_s in self._replica.engine.open_since_s()]
        yield "skerry_rounds_open", (run,), len(ages_s)
        yield "skerry_round_age_seconds", (run,), max(ages_s, default=0.0)
        yield "skerry_learners", (run, "live"), len(live)
        yield "skerry_learners", (run, "participating"), len(participants(state) & live.keys())


class OnLoop:
    """A registry that may be collected from any thread: it is read on the loop, where nothing changes meanwhile."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Reads on the running loop."""
        self._registry = registry
        self._loop = asyncio.get_running_loop()

    def collect(self) -> list[Metric]:
        """Returns all metrics with their samples.

        Raises:
            TimeoutError: the loop is stuck.
        """

        async def collected() -> list[Metric]:
            return list(self._registry.collect())

        return asyncio.run_coroutine_threadsafe(collected(), self._loop).result(_SCRAPE_TIMEOUT_S)


_END: Final = object()
_CALLS: Final = ("create", "get", "write", "folders", "delete", "sync_parent")
_STREAMS: Final = ("stream", "list")
_FAILURES: Final = (StoreUnavailableError, StoreFullError)


def _call(operation: str) -> Any:
    async def call(self: MeasuredObjects, *args: Any, **options: Any) -> Any:
        with self._metrics.store_calls.labels(operation).time(), self._counted(operation):
            return await getattr(self._objects, operation)(*args, **options)

    return call


def _stream(operation: str) -> Any:
    async def stream(self: MeasuredObjects, *args: Any, **options: Any) -> AsyncIterator[Any]:
        items = getattr(self._objects, operation)(*args, **options)
        with self._metrics.store_calls.labels(operation).time(), self._counted(operation):
            item = await anext(items, _END)
        while item is not _END:
            yield item
            with self._counted(operation):
                item = await anext(items, _END)

    return stream


class MeasuredObjects:
    """Passes every call on to `objects`, times it and counts failures of the store.

    A missing object and a name that is taken are answers, not failures: tailing the log and losing a number are made of
    them. A stream or a listing takes as long as its first item; later ones also wait for their reader.
    """

    create, get, write, folders, delete, sync_parent = map(_call, _CALLS)
    stream, list = map(_stream, _STREAMS)

    def __init__(self, objects: Objects, metrics: SyncerMetrics) -> None:
        """Every counter of failures begins at 0, so that the first failure is an increase."""
        for operation in (*_CALLS, *_STREAMS):
            for failure in _FAILURES:
                metrics.store_errors.labels(operation, failure.reason)
        self._objects = objects
        self._metrics = metrics

    @contextmanager
    def _counted(self, operation: str) -> Iterator[None]:
        try:
            yield
        except _FAILURES as error:
            self._metrics.store_errors.labels(operation, error.reason).inc()
            raise
