"""Trains nanoGPT on Shakespeare's characters in one place, far apart, and alone: `python -m benchmarks.public`."""

from __future__ import annotations

import os
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from benchmarks.public.cases import KINDS, LENGTHS, SEEDS, TUNING_SEEDS, TUNING_STEPS, jobs, tuning_jobs
from benchmarks.quality.arms import Arm, Job
from benchmarks.quality.jobs import Outcomes, run_jobs
from benchmarks.quality.nanogpt import TEXT_VARIABLE, write_plays
from benchmarks.quality.statistics import Estimate, estimate, share_of_gap
from benchmarks.report import DIRECTORY

_ALONE, _TOGETHER = list(KINDS)[:2]


@click.command(
    epilog="""\b
Examples:
  python -m benchmarks.public                            on the plays; hours, goes on where it was cut off
  python -m benchmarks.public --data tinyshakespeare.txt the text of nanoGPT's own results
  python -m benchmarks.public --tune                     the learning rates of the grid
"""
)
@click.option(
    "--data",
    type=click.Path(exists=True, dir_okay=False, resolve_path=True, path_type=Path),
    help="A text, of which the last tenth is held out.  [default: Shakespeare's plays]",
)
@click.option("--tune", is_flag=True, help="Try the learning rates of the grid instead.")
@click.option("--processes", type=click.IntRange(min=1), help="Jobs at a time.  [default: processor cores]")
def main(*, data: Path | None, tune: bool, processes: int | None) -> None:
    """Train nanoGPT's processor recipe in each way, and say how the held-out losses compare.

    What was trained once is kept in build/benchmarks/public-outcomes.jsonl.
    """
    if data is None:
        data = DIRECTORY / "plays.txt"
        try:
            write_plays(data)
        except LookupError as error:
            raise click.ClickException(f"{error} with --data") from error
    os.environ[TEXT_VARIABLE] = str(data)  # for the processes that train
    outcomes = Outcomes(DIRECTORY / "public-outcomes.jsonl")
    wanted = tuning_jobs(data.stem) if tune else jobs(data.stem)
    run_jobs(wanted, outcomes, process_count=processes or os.cpu_count())
    Console(width=150).print(_rates(outcomes, data.stem) if tune else _table(outcomes, data.stem))


def _rates(outcomes: Outcomes, text: str) -> Table:
    """Returns the losses of the grid, the best of each row marked."""
    tuned = {name: kind for name, kind in KINDS.items() if kind.grid}
    rates = sorted({rate for kind in tuned.values() for rate in kind.grid})
    table = Table("peak rate", *(f"{rate:g}" for rate in rates), title=f"held-out loss after {TUNING_STEPS} steps")
    for name, kind in tuned.items():
        losses = {
            rate: _losses(outcomes, kind.arm(text, TUNING_STEPS, rate), text, TUNING_SEEDS).mean for rate in kind.grid
        }
        best = min(losses, key=losses.__getitem__)
        table.add_row(
            name,
            *(f"{'*' if rate == best else ''}{losses[rate]:.4f}" if rate in losses else "" for rate in rates),
        )
    return table


def _table(outcomes: Outcomes, text: str) -> Table:
    """Returns losses with the half width of their 95 % interval, and shares of the gap."""
    columns = [f"{steps} steps" for steps in LENGTHS]
    table = Table("", *columns, title=f"held-out loss, {len(SEEDS)} seeds; share of the gap from {_ALONE}")
    for name, kind in KINDS.items():
        cells = []
        for steps in LENGTHS:
            if steps not in kind.lengths:
                cells.append("")
                continue
            loss, alone, together = (
                _losses(outcomes, each.arm(text, steps), text, SEEDS)
                for each in (kind, KINDS[_ALONE], KINDS[_TOGETHER])
            )
            share = share_of_gap(loss.samples, alone.samples, together.samples)
            cells.append(f"{_shown(loss, 3)}  {'' if name in (_ALONE, _TOGETHER) else _shown(share, 2)}")
        table.add_row(name, *cells)
    return table


def _losses(outcomes: Outcomes, arm: Arm, text: str, seeds: tuple[int, ...]) -> Estimate:
    return estimate([outcomes[Job(arm, seed)].losses[text] for seed in seeds])


def _shown(value: Estimate, digits: int) -> str:
    width = "" if value.half_width is None else f" ± {value.half_width:.{digits}f}"
    return f"{value.mean:.{digits}f}{width}"


if __name__ == "__main__":
    main()
