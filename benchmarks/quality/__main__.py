"""Runs the quality benchmark: `python -m benchmarks.quality`, or `--short` for a look in some minutes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import click
from rich.console import Console

from benchmarks.quality.cases import SHORT, TABLE, Case, jobs_of
from benchmarks.quality.jobs import Outcomes, run_jobs
from benchmarks.quality.table import lines_of, print_lines
from benchmarks.report import DIRECTORY, write_rows

COMMITTED: Final = Path(__file__).parent / "results" / "outcomes.jsonl"
"""Outcomes of the whole table, as they stand in the documents."""


@click.command(
    epilog="""\b
Examples:
  python -m benchmarks.quality --short        one seed of a few cases, under 10 minutes on 2 cores
  python -m benchmarks.quality                the whole table, 90 minutes on 2 quiet cores
  python -m benchmarks.quality --committed    the table of the committed results, without training
"""
)
@click.option("--short", is_flag=True, help="A few cases, one seed.")
@click.option("--committed", is_flag=True, help="Show the committed results; train nothing.")
@click.option("--processes", type=click.IntRange(min=1), help="Jobs at a time.  [default: processor cores]")
def main(*, short: bool, committed: bool, processes: int | None) -> None:
    """Train islands, one place and one island alone on the same data, and say how they compare.

    Everything is real but time: the product's rounds, merge, codecs, schedule and adoption, driven without sockets.
    What was trained once is kept in build/benchmarks/quality-outcomes.jsonl, so that a run that was cut off goes on.
    """
    outcomes = Outcomes(COMMITTED if committed else DIRECTORY / "quality-outcomes.jsonl")
    cases: tuple[Case, ...] = SHORT if short else TABLE
    jobs = [job for case in cases for job in jobs_of(case)]
    missing = [job for job in jobs if job not in outcomes]
    if committed and missing:
        raise click.ClickException(
            f"the committed results lack {len(missing)} of {len(jobs)} jobs: never run, or changed since. "
            "run it without --committed to train them"
        )
    run_jobs(jobs, outcomes, process_count=processes or os.cpu_count())
    lines = [line for case in cases for line in lines_of(case, outcomes)]
    print_lines("quality", lines)
    write_rows("quality", [line.to_row() for line in lines], console=Console(quiet=True))
    click.echo(f"rows: {DIRECTORY / 'quality.json'}", err=True)


if __name__ == "__main__":
    main()
