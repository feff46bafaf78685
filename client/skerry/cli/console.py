"""Tables, and quantities with their units, for people to read."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The width of tables in a pipe or a file; every table here fits.
_PIPE_WIDTH: Final = 160
# Gives a command the flag `--json`.
as_json: Final = click.option("--json", "is_json", is_flag=True, help="Print JSON, for scripts.")


def json_line(values: object) -> str:
    """Returns JSON values as one line of ASCII; a number that is not finite, such as a loss that diverged, is null."""
    return json.dumps(json.loads(msgspec.json.encode(values)), separators=(",", ":"))


def console() -> Console:
    """Returns a console on the current standard output."""
    screen = Console()
    return screen if screen.is_terminal else Console(width=_PIPE_WIDTH)


def table(rows: Sequence[Mapping[str, str | Text]]) -> Table:
    """Returns a table of rows by column, all with the same columns; those of numbers are aligned to the right."""
    shown = Table(box=None, header_style="dim", pad_edge=False)
    for column in rows[0] if rows else ():
        has_numbers = all(re.match(r"-$|\d", str(row[column])) for row in rows)
        shown.add_column(column, justify="right" if has_numbers else "left", no_wrap=True)
    for row in rows:
        shown.add_row(*row.values())
    return shown


def save_picture(figure: Figure, path: Path) -> None:
    """Writes the file of `--plot`.

    Raises:
        click.BadParameter: it can't be written, or matplotlib does not know its kind.
    """
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise click.BadParameter(f"can't be drawn. error={error}", param_hint="--plot") from error


@contextmanager
def shown_progress(activity: str) -> Iterator[Callable[[int, int], None]]:
    """Shows a progress bar if standard error is a terminal; yields a function to call with (done, in all)."""
    shown = Console(stderr=True)
    columns = (TextColumn(activity), BarColumn(), TextColumn("{task.completed} of {task.total}"))
    with Progress(*columns, console=shown, disable=not shown.is_terminal, transient=True) as progress:
        task = progress.add_task(activity, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def size_text(size_bytes: float) -> str:
    """Returns a size in decimal units: 1536 is "1.5 kB"."""
    return _scaled(size_bytes, (" B", " kB", " MB", " GB", " TB"))


def rate_text(bits_per_s: float | None) -> str:
    """Returns a bandwidth with its unit: 1.5e6 is "1.5 Mbit/s"; an unknown one is a dash."""
    return "-" if bits_per_s is None else _scaled(bits_per_s, (" bit/s", " kbit/s", " Mbit/s", " Gbit/s"))


def count_text(count: int) -> str:
    """Returns a count in short form: 12_000_000 is "12.0M"."""
    return _scaled(count, ("", "k", "M", "G", "T"))


def _scaled(value: float, units: Sequence[str]) -> str:
    """Returns a value in the first unit that makes it less than 1000, else in the last; whole numbers in the first."""
    power = 0
    while abs(value) >= 1000 and power < len(units) - 1:
        value, power = value / 1000, power + 1
    return f"{value:.{min(power, 1)}f}{units[power]}"
