"""Random mixes of learners beside the best of their parts: `python -m benchmarks.quality.mixes`.

A mix has three to eight learners of random speed, batch, delay and life. All stop by one clock. Its loss is held
against the best of its learners by themselves and, with `--parts`, of the runs of two to four of them, under the same
clock and on the same data. The best part is chosen by the losses under one seed, and compared under another.

Mixes are drawn by their numbers. Those below 20 are for tuning, and those from 20 on for reporting.
"""

from __future__ import annotations

import math
import os
import random
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Final

import click
from rich.console import Console
from rich.table import Table

from benchmarks.quality.arms import Arm, DataParallel, Island, Islands, Job, islands
from benchmarks.quality.jobs import Outcomes, run_jobs
from benchmarks.quality.nanogpt import TEXT_VARIABLE
from benchmarks.quality.statistics import percent_over
from benchmarks.quality.task import BYTES, CPP, PYTHON
from benchmarks.report import DIRECTORY

COMMITTED: Final = Path(__file__).parent / "results" / "mixes.jsonl"
"""Outcomes of the mixes for reporting."""
REPORTED: Final = range(20, 40)
CHOICE_SEED, REPORT_SEED = 0, 1
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
    other_data: str | None = None  # of the learners with data of another kind


def size_of(name: str, text: str) -> Size:
    """Returns the size of this name; all but the smallest train on the characters of a text."""
    if name == BYTES:
        return Size(BYTES, 800, 1.2e-2, PYTHON, CPP)
    return Size(name, 600, 8e-3, text)


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
    indices = range(len(mix.islands)) if chosen is None else chosen
    made = tuple(replace(mix.islands[index], part=index + 1) for index in indices)
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
        part=index + 1,
        data=island.data,
        judged_on=_kinds(mix),
        task=size.task,
    )


def _kinds(mix: Mix) -> tuple[str, ...]:
    return tuple(dict.fromkeys(island.data for island in mix.islands))


def parts(mix: Mix, size: Size, *, with_groups: bool) -> dict[tuple[int, ...], Arm]:
    """Returns each learner by itself and, if asked for, each group of two to four, but for the mix itself."""
    count = len(mix.islands)
    single: dict[tuple[int, ...], Arm] = {(index,): alone(mix, size, index) for index in range(count)}
    largest = min(_LARGEST_PART, count - 1) if with_groups else 1
    return single | {
        chosen: together(mix, size, chosen)
        for group_size in range(2, largest + 1)
        for chosen in combinations(range(count), group_size)
    }


@click.command(
    epilog="""\b
Examples:
  python -m benchmarks.quality.mixes                                  20 mixes beside their best learners, 40 minutes
  python -m benchmarks.quality.mixes --parts --mix 20                 one mix beside all groups of its learners
  python -m benchmarks.quality.mixes --task nanogpt-0.2M --data tinyshakespeare.txt
  python -m benchmarks.quality.mixes --committed                      the committed results, without training
"""
)
@click.option("--mix", "numbers", multiple=True, type=int, help="A mix.  [default: 20 to 39]")
@click.option("--task", type=click.Choice([BYTES, "nanogpt-0.2M", "nanogpt-0.8M"]), default=BYTES, show_default=True)
@click.option("--data", type=click.Path(exists=True, dir_okay=False, resolve_path=True, path_type=Path))
@click.option("--parts", "with_groups", is_flag=True, help="Also train every group of two to four learners.")
@click.option("--committed", is_flag=True, help="Show the committed results; train nothing.")
@click.option("--processes", type=click.IntRange(min=1), help="Jobs at a time.  [default: processor cores]")
def main(
    *,
    numbers: tuple[int, ...],
    task: str,
    data: Path | None,
    with_groups: bool,
    committed: bool,
    processes: int | None,
) -> None:
    """Train mixes of unequal, late and dying learners, and say how they compare with the best of their parts."""
    if task != BYTES and data is None:
        raise click.UsageError("this task takes a text: give --data FILE")
    text = data.stem if data is not None else ""
    os.environ[TEXT_VARIABLE] = str(data or "")  # for the processes that train
    size = size_of(task, text)
    outcomes = Outcomes(COMMITTED if committed else DIRECTORY / "mixes-outcomes.jsonl")
    mixes = [draw(number, size) for number in numbers or REPORTED]
    arms = {mix: (together(mix, size), parts(mix, size, with_groups=with_groups)) for mix in mixes}
    if not committed:
        choices = [Job(arm, CHOICE_SEED) for _, part in arms.values() for arm in part.values()]
        run_jobs(choices, outcomes, process_count=processes)
        compared = [arm for whole, part in arms.values() for arm in (whole, part[_best(part, outcomes)])]
        run_jobs([Job(arm, REPORT_SEED) for arm in compared], outcomes, process_count=processes)
    try:
        shown = _table(arms, outcomes)
    except KeyError as error:
        raise click.ClickException("these were not trained: leave out --committed") from error
    Console(width=120).print(shown)


def _loss(arm: Arm, seed: int, outcomes: Outcomes) -> float:
    return statistics.fmean(outcomes[Job(arm, seed)].losses.values())


def _best(part: Mapping[tuple[int, ...], Arm], outcomes: Outcomes) -> tuple[int, ...]:
    return min(part, key=lambda chosen: _loss(part[chosen], CHOICE_SEED, outcomes))


def _table(arms: Mapping[Mix, tuple[Islands, Mapping[tuple[int, ...], Arm]]], outcomes: Outcomes) -> Table:
    table = Table(
        "mix", "learners", "loss", "best part", "its loss", "over it, %", title="mixes beside their best part"
    )
    wholes, bests = [], []
    for mix, (whole, part) in arms.items():
        best = _best(part, outcomes)
        wholes.append(_loss(whole, REPORT_SEED, outcomes))
        bests.append(_loss(part[best], REPORT_SEED, outcomes))
        over = f"{100 * (wholes[-1] / bests[-1] - 1):+.1f}"
        names = ", ".join(map(str, best))
        table.add_row(str(mix.number), str(len(mix.islands)), f"{wholes[-1]:.3f}", names, f"{bests[-1]:.3f}", over)
    over_all = percent_over(wholes, bests)
    table.caption = f"mean {over_all.mean:+.1f} %, worst {max(over_all.samples):+.1f} %"
    return table


if __name__ == "__main__":
    main()
