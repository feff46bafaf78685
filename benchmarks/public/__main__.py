"""Trains nanoGPT on Shakespeare's characters in one place, far apart, and alone: `python -m benchmarks.public`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

import click
from rich.console import Console
from rich.table import Table

from benchmarks.public.cases import KINDS, LENGTHS, SEEDS, TUNING_STEPS, arm, jobs, tune
from benchmarks.quality.arms import Job
from benchmarks.quality.jobs import Outcomes, run_jobs
from benchmarks.quality.nanogpt import TEXT_VARIABLE, write_plays
from benchmarks.quality.statistics import Estimate, estimate, share_of_gap
from benchmarks.report import DIRECTORY

COMMITTED: Final = Path(__file__).parent / "results" / "outcomes.jsonl"
COMMITTED_TEXT: Final = "tinyshakespeare"
"""Outcomes on this text, of the rows that were trained so far."""
_ALONE, _TOGETHER = list(KINDS)[:2]


@click.command(
    epilog="""\b
Examples:
  python -m benchmarks.public                            on the plays; hours, goes on where it was cut off
  python -m benchmarks.public --data tinyshakespeare.txt the text of nanoGPT's own results
  python -m benchmarks.public --only "one learner"       one row
  python -m benchmarks.public --committed                the committed results, without training
"""
)
@click.option(
    "--data",
    type=click.Path(exists=True, dir_okay=False, resolve_path=True, path_type=Path),
    help="A text, of which the last tenth is held out.  [default: Shakespeare's plays]",
)
@click.option("--only", "names", multiple=True, type=click.Choice(list(KINDS)), help="A row.  [default: all]")
@click.option("--steps", type=click.Choice([str(steps) for steps in LENGTHS]), help="One length.  [default: all]")
@click.option("--committed", is_flag=True, help="Show the committed results; train nothing.")
@click.option("--processes", type=click.IntRange(min=1), help="Jobs at a time.  [default: processor cores]")
def main(
    *, data: Path | None, names: tuple[str, ...], steps: str | None, committed: bool, processes: int | None
) -> None:
    """Train nanoGPT's processor recipe in each way, and say how the held-out losses compare.

    What was trained once is kept in build/benchmarks/public-outcomes.jsonl.
    """
    if committed:
        known, rates = Outcomes(COMMITTED), {}
        for name in (name for name, kind in KINDS.items() if kind.tuned_as is None):
            with suppress(KeyError):  # not tuned yet
                rates[name] = tune(name, COMMITTED_TEXT, lambda job: known[job].losses[COMMITTED_TEXT])
        Console(width=150).print(_table(known, COMMITTED_TEXT, rates))
        return
    if data is None:
        data = DIRECTORY / "plays.txt"
        try:
            write_plays(data)
        except LookupError as error:
            raise click.ClickException(f"{error} with --data") from error
    os.environ[TEXT_VARIABLE] = str(data)  # for the processes that train
    outcomes, text = Outcomes(DIRECTORY / "public-outcomes.jsonl"), data.stem

    def loss_of(job: Job) -> float:
        run_jobs([job], outcomes)
        return outcomes[job].losses[text]

    kinds = names or tuple(KINDS)
    rates = {name: tune(name, text, loss_of) for name in {KINDS[kind].tuned_as or kind for kind in kinds}}
    lengths = (int(steps),) if steps else LENGTHS
    run_jobs(jobs(kinds, lengths, text, rates), outcomes, process_count=processes)
    Console(width=150).print(_table(outcomes, text, rates))


def _table(outcomes: Outcomes, text: str, rates: Mapping[str, float]) -> Table:
    """Returns losses with the half width of their 95 % interval, and shares of the gap."""
    columns = [f"{steps} steps" for steps in LENGTHS]
    title = f"held-out loss on {text}, {len(SEEDS)} seeds; share of the gap from {_ALONE}"
    table = Table("", "peak rate", *columns, title=title, caption=f"rates are tuned at {TUNING_STEPS} steps")

    def losses(name: str, steps: int) -> Estimate | None:
        rate = KINDS[name].tuned_as or name
        if rate not in rates or steps not in KINDS[name].lengths:
            return None
        made = [Job(arm(name, text, steps, rates), seed) for seed in SEEDS]
        return estimate([outcomes[job].losses[text] for job in made]) if all(job in outcomes for job in made) else None

    for name, kind in KINDS.items():
        cells = []
        for steps in LENGTHS:
            loss, alone, together = (losses(each, steps) for each in (name, _ALONE, _TOGETHER))
            cell = "" if loss is None else _shown(loss, 3)
            if loss and alone and together and name not in (_ALONE, _TOGETHER):
                cell += f"  {_shown(share_of_gap(loss.samples, alone.samples, together.samples), 2)}"
            cells.append(cell)
        table.add_row(name, f"{rates.get(kind.tuned_as or name, 0):g}", *cells)
    return table


def _shown(value: Estimate, digits: int) -> str:
    width = "" if value.half_width is None else f" ± {value.half_width:.{digits}f}"
    return f"{value.mean:.{digits}f}{width}"


if __name__ == "__main__":
    main()
