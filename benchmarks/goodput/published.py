"""The tables that Decoupled DiLoCo states, each beside what the simulator says.

The paper's goodput is the share of the allocated time that goes into steps, which is called training here. A job alone
has no rounds, and a failure stops it for a constant time in which others cost nothing: it trains for m / (m + loss) of
the time, m being the mean time between its failures. An elastic job goes on without the chip's slice, which is replaced
after the time for which a rigid job waits: a constant share of its chips is away. Learners are elastic jobs in a run.
In the paper a quorum of all stops every learner until the slowest is done. Here learners train on, and the steps beyond
their round's length do not count.

Source: Decoupled DiLoCo (arXiv 2604.21428): goodput under failures, unequal hardware, scavenging.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Final

from skerry.wire.policy import Policy
from skerry_syncer.simulation.history import History
from skerry_syncer.simulation.scenario import (
    ELASTIC_LOSS_S,
    RIGID_LOSS_S,
    SLICE_CHIPS,
    YEAR_S,
    Region,
    Scenario,
)
from skerry_syncer.simulation.world import World

CHIPS: Final = (150e3, 300e3, 600e3, 1.2e6, 2.4e6)
_JOBS: Final = {
    "data-parallel, rigid": (RIGID_LOSS_S, 0.0, (72, 57, 38, 27, 18)),
    "data-parallel, elastic": (ELASTIC_LOSS_S, SLICE_CHIPS * RIGID_LOSS_S / YEAR_S, (88, 80, 69, 58, 40)),
}
_LEARNERS: Final = {
    2: (94, 88, 80, 70, 54),
    4: (96, 93, 89, 82, 73),
    8: (98, 96, 94, 88, 80),
    16: (99, 98, 96, 93, 86),
}
_SCAVENGED: Final = {0.25: 90, 0.5: 83, 1.0: 75, 3.0: 62}  # per cent of the time, by extra compute for half of the work
_SLOWER: Final = 1.18  # step time of four of the eight learners of unequal hardware
_JITTER: Final = 0.1
# Simulated seconds of all learners of a cell together: half a point of noise at most.
_LEARNER_S: Final = 86_400.0
_UNEQUAL_S: Final = 7200.0
_SCAVENGING_S: Final = 14_400.0


@dataclass(frozen=True)
class Cell:
    """One cell, in per cent; `goodput` counts merged steps, where there are rounds."""

    case: str
    published: float
    simulated: float
    goodput: float | None = None
    metric: str = "training"


def cells(seed: int) -> Iterator[Cell]:
    """Yields all cells."""
    yield from _goodput(seed)
    yield from _unequal(seed)
    yield from _scavenging(seed)


def _goodput(seed: int) -> Iterator[Cell]:
    for row, (loss_s, away_share, published) in _JOBS.items():
        for chips, percent in zip(CHIPS, published, strict=True):
            mtbf_s = YEAR_S / chips
            share = (1 - away_share) * mtbf_s / (mtbf_s + loss_s)
            yield Cell(f"{row}, {chips / 1e3:g}k chips", percent, 100 * share)
    for learners, published in _LEARNERS.items():
        for chips, percent in zip(CHIPS, published, strict=True):
            region = Region("r", count=learners, chip_count=chips / learners, slice_chip_count=SLICE_CHIPS)
            history = World(Scenario((region,), _LEARNER_S / learners, fragment_count=1, seed=seed)).run()
            yield _cell(f"M={learners}, {chips / 1e3:g}k chips", percent, history)


def _unequal(seed: int) -> Iterator[Cell]:
    regions = (Region("fast", count=4, jitter=_JITTER), Region("slow", _SLOWER, count=4, jitter=_JITTER))
    source, rounds = Random(seed), int(_UNEQUAL_S)
    steps = [region.step_s for region in regions for _ in region.learners]
    slowest_s = sum(max(step_s * source.gauss(1.0, _JITTER) for step_s in steps) for _ in range(rounds)) / rounds
    waiting = 100 * sum(steps) / len(steps) / slowest_s
    yield Cell("unequal hardware, K=8, learners wait for the slowest", 84, waiting)
    for row, percent, policy in (
        ("K=8, Skerry", 84, Policy(quorum_count=8)),
        ("K=1, no grace", 100, Policy(grace_factor=0.0)),
        ("K=1, grace", 100, Policy()),
    ):
        history = World(Scenario(regions, _UNEQUAL_S, policy, fragment_count=1, seed=seed)).run()
        yield _cell(f"unequal hardware, {row}", percent, history)


def _scavenging(seed: int) -> Iterator[Cell]:
    """Yields when as much is merged as without the extra learners, which come when half of it is."""
    own = Region("own", count=4)
    alone = World(Scenario((own,), _SCAVENGING_S, fragment_count=1, seed=seed)).run()
    total = alone.shares()["merged_step_count"]
    for extra, percent in _SCAVENGED.items():
        others = Region("extra", count=own.count * extra, join_s=_SCAVENGING_S / 2)
        history = World(Scenario((own, others), _SCAVENGING_S, fragment_count=1, seed=seed)).run()
        share = 100 * _reached_s(history, total) / _reached_s(alone, total)
        yield Cell(f"{extra:.0%} more compute for half of the work", percent, share, metric="time")


def _reached_s(history: History, merged_step_count: float) -> float:
    """Returns when so many steps were merged."""
    merged = 0.0
    for each in history.rounds:
        merged += sum(each.step_counts.values())
        if merged >= merged_step_count:
            return each.merged_s
    return history.scenario.duration_s


def _cell(case: str, percent: float, history: History) -> Cell:
    shares = history.shares()
    return Cell(case, percent, 100 * shares["training"], 100 * shares["goodput"])
