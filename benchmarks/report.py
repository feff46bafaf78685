"""The one form in which benchmarks report: rows of a measured value beside the bound measured in the same run."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

DIRECTORY: Final = Path(__file__).parents[1] / "build" / "benchmarks"


@dataclass(frozen=True)
class Row:
    """One measured value.

    `limit` is the bound that was measured in the same run (or follows from the format) and `ratio` is value / limit;
    both are None where there is none. `samples` are the single measurements that `value` is the median of.
    """

    case: str
    metric: str
    value: float
    unit: str
    limit: float | None = None
    ratio: float | None = None
    samples: tuple[float, ...] = ()


def measured(case: str, metric: str, samples: Sequence[float], unit: str, *, limit: float | None = None) -> Row:
    """Return the row of the samples' median.

    Raises:
        ValueError: there are no samples.
    """
    if not samples:
        msg = f"nothing was measured. case={case}, metric={metric}"
        raise ValueError(msg)
    value = statistics.median(samples)
    ratio = value / limit if limit else None
    return Row(case, metric, value, unit, limit, ratio, tuple(samples))


def write_rows(name: str, rows: Iterable[Row], *, console: Console | None = None) -> Path:
    """Write build/benchmarks/<name>.json, print the same as a table, and return the file's path."""
    rows = list(rows)
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    path = DIRECTORY / f"{name}.json"
    path.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    table = Table(title=name)
    for heading in ("case", "metric", "value", "unit", "limit", "ratio", "spread"):
        table.add_column(heading, justify="left" if heading in {"case", "metric", "unit"} else "right")
    for row in rows:
        table.add_row(
            row.case, row.metric, _number(row.value), row.unit, _number(row.limit), _number(row.ratio), _spread(row)
        )
    (console or Console()).print(table)
    return path


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def _spread(row: Row) -> str:
    """Return the samples' ends, so that a noisy machine shows."""
    if len(row.samples) < 2:
        return ""
    return f"{_number(min(row.samples))} to {_number(max(row.samples))}"
