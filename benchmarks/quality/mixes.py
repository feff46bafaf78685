"""Random mixes of learners against every part of themselves: `python -m benchmarks.quality.mixes`.

A mix has three to eight learners of random speed, batch, delay and life. All stop by one clock. Its loss is held against
the best of its learners by themselves and of the runs of two to four of them, each under the same clock and on the same
data. The best part is chosen by the losses of one seed, and compared by another's.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Final

from benchmarks.quality.arms import Arm, DataParallel, Island, Islands, Job, islands
from benchmarks.quality.task import BYTES, CPP, PYTHON

_COUNTS: Final = (3, 8)
_SLOWEST: Final = 1 / 8
_BATCHES: Final = (2, 32)
_H: Final = 24
_LARGEST_PART: Final = 4


@dataclass(frozen=True)
class Size:
    """What the learners of a mix train, and for how long."""

    task: str
    step_count: int  # time units, in each of which a learner of speed 1 takes a step
    peak_rate: float
    data: str
    other_data: str | None  # of the learners with data of another kind


@dataclass(frozen=True)
class Mix:
    """Learners that train together."""

    number: int
    islands: tuple[Island, ...]


def draw(number: int, size: Size) -> Mix:
    """Returns the mix of this number: its learners depend on nothing else but the length of the run."""
    draw = random.Random(f"mix {number}")
    count = draw.randint(*_COUNTS)
    length = size.step_count
    speeds = [math.exp(draw.uniform(math.log(_SLOWEST), 0)) for _ in range(count)]
    batches = [round(math.exp(draw.uniform(*map(math.log, _BATCHES)))) for _ in range(count)]
    delays = [draw.uniform(1, _H / 2) for _ in range(count)]  # own steps
    absent: list[tuple[tuple[float, float], ...]] = [()] * count
    marked = draw.sample(range(1, count), k=min(count - 1, 4))  # the first one creates the run
    for index in marked[: draw.randint(0, 2)]:  # dies, for a tenth of the run or for good
        start = draw.uniform(0.1, 0.9) * length
        absent[index] = ((start, min(length, start + draw.choice((0.1, 1.0)) * length)),)
    for index in marked[2:][: draw.randint(0, 2)]:  # joins late
        absent[index] = ((0.0, draw.uniform(0.1, 0.5) * length),)
    other = draw.choice(range(1, count)) if draw.random() < 0.25 and size.other_data else None
    return Mix(
        number,
        tuple(
            Island(
                speed=speeds[index],
                batch_size=batches[index],
                data=size.other_data if index == other and size.other_data else size.data,
                extra_delay=max(0.0, delays[index] / speeds[index] - 1),
                absent=absent[index],
            )
            for index in range(count)
        ),
    )


def together(mix: Mix, size: Size, chosen: Iterable[int] | None = None) -> Islands:
    """Returns the run of the mix, or of the chosen of its learners, who keep their data."""
    made = tuple(mix.islands if chosen is None else (mix.islands[index] for index in chosen))
    return islands(
        len(made),
        size.step_count,
        size.peak_rate,
        islands=made,
        delay=1.0,
        is_wall_clock=True,
        shard_count=len(mix.islands),
        judged_on=_kinds(mix),
        task=size.task,
    )


def alone(mix: Mix, size: Size, index: int) -> DataParallel:
    """Returns what one learner of the mix trains by itself in its time, if its absences cost it nothing but time."""
    island = mix.islands[index]
    time = size.step_count - sum(end - start for start, end in island.absent)
    return DataParallel(
        1,
        max(1, round(island.speed * time)),
        size.peak_rate,
        batch_size=island.batch_size,
        shard_count=len(mix.islands),
        data=island.data,
        judged_on=_kinds(mix),
        task=size.task,
    )


def _kinds(mix: Mix) -> tuple[str, ...]:
    return tuple(dict.fromkeys(island.data for island in mix.islands))
