"""Trains nanoGPT on Shakespeare's characters in one place, far apart, and alone: `python -m benchmarks.public`."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Final

import click
from rich.console import Console

from benchmarks.public.cases import KINDS, LENGTHS, PUBLISHED, jobs, lengths_of, tune
from benchmarks.quality.arms import Job
from benchmarks.quality.jobs import Outcomes, run_jobs
from benchmarks.quality.nanogpt import TEXT_VARIABLE, write_plays
from benchmarks.report import DIRECTORY

COMMITTED: Final = Path(__file__).parent / "results" / "outcomes.jsonl"
COMMITTED_TEXT: Final = "tinyshakespeare"
"""Outcomes on this text, of the cells that were trained so far."""


@click.command(
    epilog="""\b
Examples:
  python -m benchmarks.public                            on the plays; hours, goes on where it was cut off
  python -m benchmarks.public --data tinyshakespeare.txt the text of nanoGPT's own results
  python -m benchmarks.public --only "one learner"       one row
  python -m benchmarks.public --size 3M                  a larger model, and fewer steps
  python -m benchmarks.public --committed                the committed results, without training
"""
)
@click.option(
    "--data",
    type=click.Path(exists=True, dir_okay=False, resolve_path=True, path_type=Path),
    help="A text, of which the last tenth is held out.  [default: Shakespeare's plays]",
)
@click.option("--size", type=click.Choice(list(LENGTHS)), default=PUBLISHED, show_default=True, help="Parameters.")
@click.option("--only", "names", multiple=True, type=click.Choice(list(KINDS)), help="A row.  [default: all]")
@click.option("--steps", type=click.Choice(sorted({*chain(*LENGTHS.values())})), help="One length.  [default: all]")
@click.option("--committed", is_flag=True, help="Show the committed results; train nothing.")
@click.option("--processes", type=click.IntRange(min=1), help="Jobs at a time.  [default: processor cores]")
def main(
    *, data: Path | None, size: str, names: tuple[str, ...], steps: int | None, committed: bool, processes: int | None
) -> None:
    """Train nanoGPT's processor recipe in each way, and say how the held-out losses compare.

    What was trained once is kept in build/benchmarks/public-outcomes.jsonl. The picture goes to build/benchmarks.
    """
    lengths = LENGTHS[size] if steps is None else (steps,)
    kinds = [name for name in names or KINDS if {*lengths} & {*lengths_of(name, size)}]
    if not kinds:
        raise click.UsageError("no row has these options: see --committed for those that there are")
    if committed:
        outcomes, text, rates = Outcomes(COMMITTED), COMMITTED_TEXT, {}
        for name in _tuned(KINDS, size):
            with suppress(KeyError):  # not tuned yet
                rates[name] = tune(name, size, text, lambda job: outcomes[job].losses[text])
    else:
        path = _plays() if data is None else data
        os.environ[TEXT_VARIABLE] = str(path)  # for the processes that train
        outcomes, text = Outcomes(DIRECTORY / "public-outcomes.jsonl"), path.stem

        def loss_of(job: Job) -> float:
            run_jobs([job], outcomes)
            return outcomes[job].losses[text]

        rates = {name: tune(name, size, text, loss_of) for name in _tuned(kinds, size)}
        run_jobs(jobs(kinds, size, lengths, text, rates), outcomes, process_count=processes)
    from benchmarks.public.table import Results, draw, table  # here: matplotlib is slow to load

    results = Results(outcomes, size, text, rates)
    Console(width=150).print(table(results))
    click.echo(f"picture: {draw(results, DIRECTORY / f'public-{size}.png')}", err=True)


def _tuned(kinds: Iterable[str], size: str) -> list[str]:
    """Returns the kinds whose rates these rows have."""
    return list(dict.fromkeys(KINDS[name].tuned_as or name for name in kinds if lengths_of(name, size)))


def _plays() -> Path:
    path = DIRECTORY / "plays.txt"
    try:
        write_plays(path)
    except LookupError as error:
        raise click.ClickException(f"{error} with --data") from error
    return path


if __name__ == "__main__":
    main()
