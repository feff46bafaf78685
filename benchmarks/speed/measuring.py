"""Measures a subject and its limits in turns, so that a neighbour who comes and goes slows all of them alike."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks.report import Row

SEED: Final = 20260


@dataclass(frozen=True)
class Size:
    """How much a table measures: `samples` of each figure, and whether sizes are cut for a quick look."""

    samples: int
    is_quick: bool

    def pick(self, full: int, quick: int) -> int:
        """Returns `full`, or `quick` for a quick look."""
        return quick if self.is_quick else full


def alternate(
    actions: Mapping[str, Callable[[], object]], samples: int, *, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Returns the seconds, by `clock`, of `samples` runs of each action, in turns, after one that warms up.

    Where the actions are one thread's work, `time.process_time` leaves out what other processes take of its core.
    """
    found: dict[str, list[float]] = {name: [] for name in actions}
    for sample in range(samples + 1):
        for name, action in actions.items():
            start_s = clock()
            action()
            if sample:
                found[name].append(clock() - start_s)
    return found


def paired(case: str, metric: str, samples: Sequence[float], unit: str, *, limits: Sequence[float]) -> Row:
    """Returns the row of the samples' median; its ratio is the median of each sample's ratio to the limit beside it.

    Raises:
        ValueError: there are not as many limits as samples.
    """
    ratios = [sample / limit for sample, limit in zip(samples, limits, strict=True)]
    value, limit = statistics.median(samples), statistics.median(limits)
    return Row(case, metric, value, unit, limit, statistics.median(ratios), tuple(samples))


def rates(amount: float, seconds: Iterable[float]) -> list[float]:
    """Returns `amount` a second for each time."""
    return [amount / one for one in seconds]


def exhaust(items: Iterable[object]) -> None:
    """Takes all items and keeps none: results of one frame are freed before the next, as by a sender."""
    deque(items, maxlen=0)
