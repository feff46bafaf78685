"""Many simulated trainers on one syncer: leases that are lost, queues that grow, CPU a push, lag of the event loop.

The trainers are real clients with real sockets, in a few processes, at H = 24; only their training is made up.
"""

from __future__ import annotations

import statistics
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from benchmarks.processes import Process, Served, all_hear, children, served
from benchmarks.report import Row, measured
from benchmarks.speed.measuring import Size
from benchmarks.speed.models import arrays_of
from benchmarks.speed.transfer import RUN
from skerry import Policy, RunsClient

_LAG: Final = "skerry_event_loop_lag_seconds_bucket"
_PROCESSES: Final = 4
_LOOK_S: Final = 1.0
_STEP_S: Final = 0.5
_ROUND_S: Final = 24 * _STEP_S


@dataclass
class Looks:
    """What was seen of the syncer, once a second."""

    live: list[float] = field(default_factory=list)
    round_age_s: list[float] = field(default_factory=list)
    budget_bytes: list[float] = field(default_factory=list)


@contextmanager
def _watched(syncer: Served) -> Iterator[Looks]:
    looks, is_over = Looks(), threading.Event()

    def look() -> None:
        while not is_over.wait(_LOOK_S):
            metrics = syncer.metrics()
            looks.live.append(sum(value for name, value in metrics.items() if _is_live(name)))
            looks.round_age_s.append(sum(_of(metrics, "skerry_round_age_seconds")))
            looks.budget_bytes.append(sum(_of(metrics, "skerry_part_budget_used_bytes")))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield looks
    finally:
        is_over.set()
        thread.join()


def _is_live(name: str) -> bool:
    return name.startswith("skerry_learners{") and 'state="live"' in name


def _of(metrics: dict[str, float], name: str) -> list[float]:
    return [value for key, value in metrics.items() if key.partition("{")[0] == name]


def lag_bound_s(before: dict[str, float], after: dict[str, float], share: float) -> float:
    """Returns the upper end of the histogram's bucket that holds this share of the lags between two looks."""
    counts = {float(_edge(key)): value - before.get(key, 0.0) for key, value in after.items() if key.startswith(_LAG)}
    total = max(counts.values())
    return min(edge for edge, count in counts.items() if count >= share * total)


def _edge(key: str) -> str:
    return key.partition('le="')[2].partition('"')[0].replace("+Inf", "inf")


def rows(size: Size) -> Iterator[Row]:
    """64 trainers of a million parameters each, for four rounds after the first ones."""
    learners, numel = size.pick(64, 8), size.pick(1_000_000, 250_000)
    each = learners // _PROCESSES
    with tempfile.TemporaryDirectory(prefix="skerry-benchmark-") as name, served(Path(name)) as syncer:
        arguments = [
            f"--target={syncer.target} --first={number * each} --count={each} --numel={numel} "
            f"--step-s={_STEP_S}".split()
            for number in range(_PROCESSES)
        ]
        # Created here: of several processes that try at once, drafts that lose show as the run's metrics.
        with RunsClient(syncer.target) as client:
            client.create_run(RUN, arrays_of(numel), policy=Policy(quorum_count=learners // 2))
        with children("benchmarks.speed.crew", arguments, Path(name)) as crews:
            for crew in crews:
                crew.hear()
            _train(crews, 2 * _ROUND_S)
            first = _train(crews, 0.0 if size.is_quick else 2 * _ROUND_S)
            before, spent_s = syncer.metrics(), (syncer.cpu_s(), syncer.waited_s())
            with _watched(syncer) as looks:
                last = _train(crews, 2 * _ROUND_S)
            yield from _rows(learners, numel, (first, last), looks, syncer, before, spent_s)


def _train(crews: list[Process], duration_s: float) -> list[Any]:
    return all_hear(crews, duration_s=max(duration_s, _STEP_S))


def _rows(  # noqa: PLR0917 - what was seen of one fleet
    learners: int,
    numel: int,
    told: tuple[list[Any], list[Any]],
    looks: Looks,
    syncer: Served,
    before: dict[str, float],
    spent_s: tuple[float, float],  # CPU, and waiting for a core, before
) -> Iterator[Row]:
    first, last = told
    cpu_s, waited_s = syncer.cpu_s() - spent_s[0], syncer.waited_s() - spent_s[1]
    after = syncer.metrics()
    pushes = sum(one["acknowledged"] for one in last) - sum(one["acknowledged"] for one in first)
    case = f"{learners} trainers of {numel / 1e6:.3g}M parameters, {_STEP_S:.1f} s a step, H = 24"
    fewest, live = min(looks.live), tuple(looks.live)
    yield Row(case, "learners with a lease, fewest / all", fewest, "", learners, fewest / learners, live)
    yield measured(case, "trainers that stopped", [float(sum(len(one["failures"]) for one in last))], "")
    attached = statistics.mean(one["attached_share"] for one in last)
    yield measured(case, "share of steps at which a trainer was attached", [attached], "")
    yield measured(case, "pushes a second", [pushes / (2 * _ROUND_S)], "1/s")
    yield measured(case, "CPU of the syncer, a push", [1e3 * cpu_s / max(pushes, 1)], "ms")
    yield measured(case, "CPU of the syncer / one core", [cpu_s / (2 * _ROUND_S)], "", limit=1.0)
    metric = "time for which the event loop was ready and had no core / time"
    yield measured(case, metric, [waited_s], "s", limit=2 * _ROUND_S)
    waits = [statistics.mean(one["waiting_s"] for one in told) for told in (first, last)]
    yield measured(case, "wait for a merge, last rounds / rounds before", waits[1:], "s", limit=waits[0])
    yield measured(case, "oldest open round, longest / round", [max(looks.round_age_s)], "s", limit=_ROUND_S)
    yield measured(case, "memory for arriving parts, most", [max(looks.budget_bytes) / 1e6], "MB")
    for share, label in ((0.5, "median"), (0.99, "99th percentile")):
        bound_s = lag_bound_s(before, after, share)
        yield measured(case, f"lag of the event loop, {label}, at most", [1e3 * bound_s], "ms")
