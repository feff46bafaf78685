"""Runs the speed benchmark: `python -m benchmarks.speed`, or some of its tables by name."""

from __future__ import annotations

import signal
import sys
import time
from typing import Final

import click
from rich.console import Console

from benchmarks.report import DIRECTORY, write_rows
from benchmarks.speed.measuring import Size
from benchmarks.speed.table import COMMITTED, PICTURE, TABLES, measure, read, write, write_figures

_WHAT: Final = "\n".join(f"  {name:<16} {what}" for name, what in TABLES.items())


@click.command(
    epilog=f"""\b
Tables:
{_WHAT}

\b
Examples:
  python -m benchmarks.speed                          all tables, 12 minutes on 2 cores
  python -m benchmarks.speed --quick                  small sizes, few samples: does it run?
  python -m benchmarks.speed codec transfer           two tables
  python -m benchmarks.speed synchronisation --keep   one table, and the committed rows of it
  python -m benchmarks.speed --committed              the committed rows
"""
)
@click.argument("tables", nargs=-1, type=click.Choice(list(TABLES)))
@click.option("--quick", is_flag=True, help="Small sizes and few samples; the figures mean little.")
@click.option("--samples", type=click.IntRange(min=1), help="Measurements of each figure.  [default: 5; quick: 2]")
@click.option("--committed", is_flag=True, help="Show the committed rows; measure nothing.")
@click.option("--keep", is_flag=True, help="Put rows into the committed files, and the picture into docs.")
def main(*, tables: tuple[str, ...], quick: bool, samples: int | None, committed: bool, keep: bool) -> None:
    """Measure the data path, each figure beside the limit that was measured in the same run.

    Rows are medians, with their samples, in build/benchmarks/speed-TABLE.json and speed.json; a picture lies beside
    them. Servers listen on loopback and are ended; their stores lie in the system's temporary folder (TMPDIR), up to
    10 GB for the largest table.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers and stores go with this process
    size = Size(samples or (2 if quick else 5), quick)
    path = COMMITTED if committed or keep else DIRECTORY / "speed.json"
    rows = read(path)
    for table in tables or TABLES:
        if not committed:
            start_s = time.perf_counter()
            rows[table] = measure(table, size)
            write(path, rows)
            click.echo(f"{table}: {time.perf_counter() - start_s:.0f} s", err=True)
        write_rows(f"speed-{table}", rows[table], console=Console(width=170))
    if keep:
        write_figures(rows)
    from benchmarks.speed.picture import draw  # here: matplotlib is slow to load

    click.echo(f"picture: {draw(rows, PICTURE if keep else DIRECTORY / 'speed.png')}", err=True)
    click.echo(f"rows: {path}", err=True)


if __name__ == "__main__":
    main()
