"""The acceptance table: which arms are compared with which, and what must come out.

Every arm has the default policy unless its case says otherwise, and the learning rate that was tuned for its kind on
one grid (`python -m benchmarks.quality tune`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from benchmarks.quality.arms import Arm, DataParallel, Island, Job, Synchronous, islands
from benchmarks.quality.task import CPP, PYTHON

GRID: Final = (6e-3, 8.5e-3, 1.2e-2, 1.7e-2)
ALONE_RATE: Final = 1.2e-2
TOGETHER_RATE: Final = 1.2e-2
ISLANDS_RATE: Final = 1.2e-2
"""What `tune` found best; the rows of the grid are committed beside the results."""

STEPS: Final = 600
"""Of comparisons that name no length: 25 rounds, which show an effect as well as 62 do, at two fifths of the cost."""

_FLOAT32: Final = {"codec": "float32", "block": 128, "vector_codec": "float32", "compressor": "none"}
_MANY: Final = (0, 1, 2, 3, 4)
_SOME: Final = (0, 1, 2)


@dataclass(frozen=True)
class Comparison:
    """One row: by how many percent is the subject's loss above the reference's."""

    case: str
    subject: Arm
    reference: Arm
    reference_name: str
    bound: float  # percent, at most
    interval: float | None = None  # percent: the half width of the 95 % interval must be below
    seeds: tuple[int, ...] = _SOME


@dataclass(frozen=True)
class Gap:
    """One row: how much of the gap between alone and data-parallel is closed, and how far above data-parallel."""

    case: str
    subject: Arm
    alone: Arm
    together: Mapping[int, DataParallel]  # by its steps: how many does it need for the same loss
    share: float  # at least
    bound: float  # percent over data-parallel, at most
    seeds: tuple[int, ...] = _SOME


@dataclass(frozen=True)
class Cell:
    """One row: the defaults against the best of the settings that were tried for the cell, and against alone."""

    case: str
    subject: Arm
    settings: Mapping[str, Arm]
    alone: Arm
    bound: float  # percent over the best, at most
    seeds: tuple[int, ...] = _SOME


@dataclass(frozen=True)
class Plain:
    """One row without a bound: losses on each kind of text, by arm."""

    case: str
    arms: Mapping[str, Arm]
    seeds: tuple[int, ...] = _SOME


Case = Comparison | Gap | Cell | Plain


def jobs_of(case: Case) -> Iterable[Job]:
    """Yields every job that the case takes."""
    arms: list[Arm] = []
    match case:
        case Comparison():
            arms = [case.subject, case.reference]
        case Gap():
            arms = [case.subject, case.alone, *case.together.values()]
        case Cell():
            arms = [case.subject, case.alone, *case.settings.values()]
        case Plain():
            arms = list(case.arms.values())
    for arm in arms:
        for seed in case.seeds:
            yield Job(arm, seed)


def default(learner_count: int, step_count: int = STEPS, **settings: Any) -> Arm:
    """Islands as a newcomer gets them."""
    return islands(learner_count, step_count, ISLANDS_RATE, **settings)


def alone(step_count: int = STEPS) -> DataParallel:
    """One learner by itself."""
    return DataParallel(1, step_count, ALONE_RATE)


def together(learner_count: int, step_count: int = STEPS) -> DataParallel:
    """All in one place."""
    return DataParallel(learner_count, step_count, TOGETHER_RATE)
