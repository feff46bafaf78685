"""The metrics that a syncer serves to Prometheus; docs/operating.md has the main ones.

Counters and histograms are updated where events happen. Values that the process holds anyway are read at each scrape. A
counter of a run counts entries of its log that this replica folded, so every replica of a run counts the same.

Labels are names of runs, fragments, methods, operations and reasons: their number is bounded by what a replica serves.
Learners have no label here; each serves its own metrics (`skerry learn --metrics`).
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram, Info, ProcessCollector
from prometheus_client.core import GaugeMetricFamily, Metric

from skerry.runtime.clock import Clock
from skerry_syncer.rounds.membership import participants
from skerry_syncer.run.parts import ByteBudget
from skerry_syncer.run.replica import RunReplica
from skerry_syncer.store.log.entries import (
    AcceptedItem,
    ClosedItem,
    CollectedItem,
    CommittedItem,
    Entry,
    Fate,
    RunStatus,
)
from skerry_syncer.store.log.state import DeltaState, FragmentState, Outcome, RunState

# If the event loop has not answered by then, the scrape fails, which is an alert of its own.
_SCRAPE_TIMEOUT_S: Final = 8.0
# Time between two measurements of how late the event loop is.
_LAG_EVERY_S: Final = 0.25

_STORE_BUCKETS: Final = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 60)
_MERGE_BUCKETS: Final = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)
_LAG_BUCKETS: Final = (0.001, 0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_STALENESS_BUCKETS: Final = (0, 1, 2, 4, 8, 16)


class SyncerMetrics:
    """The metrics of one process. Everything but `collect` belongs to the event loop."""

    def __init__(self, clock: Clock) -> None:
        """Measures ages by `clock`. Nothing is served yet."""
        self.registry = registry = CollectorRegistry()
        self.build = Info("skerry_build", "The version of Skerry.", registry=registry)
        self.received_bytes = Counter("skerry_rpc_received_bytes", "Bytes of requests.", ["method"], registry=registry)
        self.sent_bytes = Counter("skerry_rpc_sent_bytes", "Bytes of responses.", ["method"], registry=registry)
        self.refusals = Counter(
            "skerry_rpc_refusals", "Calls that ended with an error.", ["method", "reason"], registry=registry
        )
        self.store_calls = Histogram(
            "skerry_store_call_duration_seconds",
            "Time of calls to the object store.",
            ["operation"],
            buckets=_STORE_BUCKETS,
            registry=registry,
        )
        self.store_errors = Counter(
            "skerry_store_errors", "Calls that the store did not carry out.", ["operation", "reason"], registry=registry
        )
        self.loop_lag = Histogram(
            "skerry_event_loop_lag_seconds", "Delay of a timer.", buckets=_LAG_BUCKETS, registry=registry
        )
        self._runs = _RunMetrics(registry)
        self._budget: ByteBudget | None = None
        self._clock = clock
        self._followed: dict[RunReplica, _Followed] = {}
        ProcessCollector(registry=registry)
        registry.register(self)

    def begin(self, version: str, budget: ByteBudget) -> None:
        """Says what this process is."""
        self.build.info({"version": version})
        self._budget = budget

    def opened(self, replica: RunReplica) -> None:
        """Follows a run that this process serves from now on."""
        self._followed[replica] = _Followed(replica, self._runs, self._clock)

    def closed(self, replica: RunReplica) -> None:
        """Drops all that is known of a run that this process no longer serves."""
        followed = self._followed.pop(replica, None)
        if followed is not None:
            followed.unsubscribe()
            if all(other.run != followed.run for other in self._followed.values()):
                self._runs.forget(followed.run)

    async def watch_lag(self) -> None:
        """Measures for ever how late the event loop is."""
        while True:
            began_s = self._clock.monotonic_s()
            await self._clock.sleep(_LAG_EVERY_S)
            self.loop_lag.observe(max(0.0, self._clock.monotonic_s() - began_s - _LAG_EVERY_S))

    def collect(self) -> Iterator[Metric]:
        """Yields what is read when it is asked for; the registry calls it, on the event loop."""
        yield _gauge("skerry_runs", "Runs that this process has open.", [((), len(self._followed))])
        if self._budget is not None:
            limit, used = self._budget.limit_bytes, self._budget.used_bytes
            yield _gauge("skerry_part_budget_bytes", "Memory for parts that arrive.", [((), limit)])
            yield _gauge("skerry_part_budget_used_bytes", "Memory that parts hold now.", [((), used)])
        # Several open runs may have one name; a committed run is shown instead of a draft.
        followed = sorted(self._followed.items(), key=lambda item: item[0].state.status is not RunStatus.DRAFT)
        runs = {one.run: one.gauges() for _, one in followed}
        for name, (documentation, labels) in _GAUGES.items():
            samples = [((run, *more), value) for run, gauges in sorted(runs.items()) for more, value in gauges[name]]
            yield _gauge(name, documentation, samples, labels=("run", *labels))


_GAUGES: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    "skerry_log_position": ("Position of the newest folded entry.", ()),
    "skerry_version": ("The newest version of a fragment.", ("fragment",)),
    "skerry_version_age_seconds": ("Time since any fragment had a new version.", ()),
    "skerry_round_length_seconds": ("Time that H inner steps take.", ()),
    "skerry_rounds_open": ("Rounds that gather deltas.", ()),
    "skerry_rounds_held": ("Open rounds that wait because the run would go faster than its learners.", ()),
    "skerry_round_age_seconds": ("Age of the oldest open round.", ()),
    "skerry_learners": ("Learners with a lease, and those of them that contribute.", ("state",)),
    "skerry_fold_items": ("What the fold of the log holds in memory.", ("kind",)),
    "skerry_versions_since_snapshot": ("Versions that a cold replica replays.", ()),
}
_Samples = list[tuple[tuple[str, ...], float]]


def _gauge(
    name: str, documentation: str, samples: Iterable[tuple[tuple[str, ...], float]], *, labels: tuple[str, ...] = ()
) -> Metric:
    family = GaugeMetricFamily(name, documentation, labels=labels)
    for values, value in samples:
        family.add_metric(values, value)
    return family


class _RunMetrics:
    """The counters and histograms that have a run for a label."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.versions = Counter("skerry_versions", "Versions committed.", ["run"], registry=registry)
        self.accepted = Counter("skerry_deltas_accepted", "Deltas accepted.", ["run"], registry=registry)
        self.decided = Counter(
            "skerry_deltas_decided", "Deltas with a final fate.", ["run", "fate", "reason"], registry=registry
        )
        self.staleness = Histogram(
            "skerry_delta_staleness_versions",
            "Versions between a merged delta's base and its merge.",
            ["run"],
            buckets=_STALENESS_BUCKETS,
            registry=registry,
        )
        self.collected = Counter(
            "skerry_collected_objects", "Objects that collections condemned.", ["run"], registry=registry
        )
        self.merges = Histogram(
            "skerry_merge_duration_seconds",
            "Time from a round's close to its version.",
            ["run"],
            buckets=_MERGE_BUCKETS,
            registry=registry,
        )

    def forget(self, run: str) -> None:
        """Removes a run's labels."""
        for metric in vars(self).values():
            metric.remove_by_labels({"run": run})


class _Followed:
    """One open run: counts what its log decides, and reads its gauges."""

    def __init__(self, replica: RunReplica, metrics: _RunMetrics, clock: Clock) -> None:
        self.run = replica.log.spec.name
        self._replica = replica
        self._metrics = metrics
        self._clock = clock
        self._version_at_s = clock.monotonic_s()
        self._closed_at_s: dict[str, float] = {}  # by fragment, of the rounds that are merged now
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
                case CollectedItem(names=names):
                    self._metrics.collected.labels(self.run).inc(len(names))
                case _:
                    pass
            for delta in outcome.decided:
                self._decided(delta)

    def _decided(self, delta: DeltaState) -> None:
        self._metrics.decided.labels(self.run, delta.fate.value, delta.short_reason).inc()
        if delta.fate is Fate.MERGED:
            self._metrics.staleness.labels(self.run).observe(delta.staleness)

    def gauges(self) -> dict[str, _Samples]:
        """Returns the samples of every gauge, without the label of the run."""
        state, now_s = self._replica.state, self._clock.monotonic_s()
        view = self._replica.membership.view(state, now_s)
        live = {name: learner for name, learner in view.learners.items() if learner.is_live}
        steps_s = [learner.step_time_s for learner in live.values() if learner.step_time_s is not None]
        ages_s = [now_s - opened_at_s for opened_at_s in self._replica.engine.open_since_s()]
        is_open = state.status is RunStatus.OPEN
        return {
            "skerry_log_position": [((), state.position)],
            "skerry_version": [((name,), fragment.version) for name, fragment in sorted(state.fragments.items())],
            "skerry_version_age_seconds": [((), now_s - self._version_at_s)] if is_open else [],
            "skerry_round_length_seconds": [
                ((), state.policy.inner_step_count * statistics.median(steps_s)) for _ in steps_s[:1]
            ],
            "skerry_rounds_open": [((), len(ages_s))],
            "skerry_rounds_held": [((), self._replica.engine.held_count(now_s))],
            "skerry_round_age_seconds": [((), max(ages_s, default=0.0))],
            "skerry_learners": [
                (("live",), len(live)),
                (("participating",), len(participants(state) & live.keys())),
            ],
            "skerry_fold_items": [((kind,), count) for kind, count in _fold_counts(state).items()],
            "skerry_versions_since_snapshot": [((), max(map(_since_snapshot, state.fragments.values()), default=0))],
        }


def _fold_counts(state: RunState) -> dict[str, int]:
    return {
        "bases": len(state.bases),
        "condemned": len(state.condemned),
        "deltas": len(state.deltas),
        "learners": len(state.learners),
        "sessions": sum(len(learner.sessions) for learner in state.learners.values()),
        "versions": sum(len(fragment.versions) for fragment in state.fragments.values()),
    }


def _since_snapshot(fragment: FragmentState) -> int:
    """Returns how many versions the fragment's newest snapshot is behind its newest version."""
    count, version = 0, fragment.versions.get(fragment.version)
    while version is not None and not version.weights:
        count, version = count + 1, fragment.versions.get(version.version - 1)
    return count


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
        return asyncio.run_coroutine_threadsafe(self._collected(), self._loop).result(_SCRAPE_TIMEOUT_S)

    async def _collected(self) -> list[Metric]:
        return list(self._registry.collect())
