"""The tables of this benchmark, what is aimed at in each, and their form in documents and in the committed file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from benchmarks.report import Row
from benchmarks.speed.measuring import Size

TABLES: Final = {
    "codec": "one core: quantise, decode, encode",
    "transfer": "push of encoded parts and pull of a snapshot, loopback",
    "merge": "eight int4 deltas of 100M parameters",
    "synchronisation": "two learners, int4 and float32 both ways, real processes",
    "growth": "the same by learners, fragments and parameters",
    "trainer": "what the training thread notices, 100M parameters",
    "fleet": "64 trainers on one syncer",
    "memory": "a syncer's peak memory by learners and fragment size",
    "bits": "bits a parameter on real training deltas",
}
"""What is measured, by name."""
COMPUTED: Final = {
    "budget": "where the processors' time of a synchronisation goes",
    "scale": "what large runs need",
}
"""What is computed from that."""
COMMITTED: Final = Path(__file__).parent / "results" / "rows.json"
PICTURE: Final = Path(__file__).parents[2] / "docs" / "speed.png"
HEADING: Final = ("| case | measured | value | limit | ratio | aim | met |", "|---|---|---|---|---|---|---|")


@dataclass(frozen=True)
class Aim:
    """What a row should show: a bound on its ratio to the limit, or on its value."""

    table: str
    metric: str
    bound: float
    is_at_most: bool = True
    is_ratio: bool = True
    case: str = ""  # a part of the case's name; empty: all cases of the metric

    def fits(self, table: str, row: Row) -> bool:
        """Whether it is this row's."""
        return (table, row.metric) == (self.table, self.metric) and self.case in row.case

    def is_met(self, row: Row) -> bool:
        """Whether the row shows it."""
        found = row.ratio if self.is_ratio else row.value
        return found is not None and (found <= self.bound if self.is_at_most else found >= self.bound)

    def __str__(self) -> str:
        """The bound as a table has it."""
        return f"{'ratio ' if self.is_ratio else ''}{'≤' if self.is_at_most else '≥'} {self.bound:g}"


AIMS: Final = (
    Aim("codec", "quantise, with error feedback / memcpy", 0.85, is_at_most=False, case="int4"),
    Aim("codec", "decode and accumulate / memcpy", 1.1, is_at_most=False, is_ratio=False, case="int4"),
    Aim("codec", "encode end to end / its parts one after another", 0.7, is_at_most=False, case="int4"),
    Aim("transfer", "push until durable / slower of the two limits", 0.6, is_at_most=False),
    Aim("transfer", "pull and check / raw gRPC stream", 0.7, is_at_most=False),
    Aim("merge", "merge to a durable update / memcpy of the deltas as float32", 5.0),
    Aim("synchronisation", "wall time / write and sync of the store's bytes", 1.5, case="float32"),
    Aim("synchronisation", "CPU of a learner, a parameter", 9.0, is_ratio=False, case="int4"),
    Aim("synchronisation", "CPU of the syncer, a contributed parameter", 7.0, is_ratio=False, case="int4"),
    Aim("trainer", "time in step(), median / step", 0.001),
    Aim("trainer", "time in step(), longest / step", 20.0, is_ratio=False),
    Aim("trainer", "training speed, exchange on / off", 0.97, is_at_most=False),
    Aim("trainer", "peak memory beyond training / float32 size", 2.5, is_ratio=False),
    Aim("fleet", "learners with a lease, fewest / all", 1.0, is_at_most=False),
    Aim("fleet", "wait for a merge, last rounds / rounds before", 1.2),
    Aim("fleet", "lag of the event loop, 99th percentile, at most", 50.0, is_ratio=False),
    Aim("memory", "peak memory of the syncer / fragment's float32 size", 4.0),
    Aim("bits", "both ways together", 7.15, is_ratio=False),
)


def measure(table: str, size: Size) -> list[Row]:
    """Returns the rows of a table that is measured."""
    module, function = ("synchronisation", "growth_rows") if table == "growth" else (table, "rows")
    # Imported here, so that a look at committed rows needs neither torch nor a syncer.
    rows: Callable[[Size], Iterator[Row]] = getattr(import_module(f"benchmarks.speed.{module}"), function)
    return list(rows(size))


def computed(tables: Mapping[str, list[Row]]) -> dict[str, list[Row]]:
    """Returns the tables that follow from the measured ones; empty ones where some were not measured."""
    return {table: list(import_module(f"benchmarks.speed.{table}").rows(tables)) for table in COMPUTED}


def to_markdown(table: str, rows: Iterable[Row]) -> Iterator[str]:
    """Yields a table's lines as the documents have them."""
    yield from HEADING
    before = ""
    for row in rows:
        aim = next((aim for aim in AIMS if aim.fits(table, row)), None)
        met = "" if aim is None else "yes" if aim.is_met(row) else "**no**"
        cells = (
            "" if row.case == before else row.case,
            row.metric,
            f"{number(row.value)} {row.unit}".rstrip(),
            "" if row.limit is None else number(row.limit),
            "" if row.ratio is None else number(row.ratio),
            "" if aim is None else str(aim),
            met,
        )
        yield f"| {' | '.join(cells)} |"
        before = row.case


def number(value: float) -> str:
    """Returns three digits of a number, or all before the point."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def read(path: Path) -> dict[str, list[Row]]:
    """Returns the rows that `write` wrote, by table; none if there is no such file."""
    if not path.exists():
        return {}
    content: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return {
        table: [Row(**{**row, "samples": tuple(row["samples"])}) for row in rows] for table, rows in content.items()
    }


def write(path: Path, tables: Mapping[str, list[Row]]) -> None:
    """Writes rows by table, in the order of `TABLES`; numbers are rounded to six digits."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = []
    for table in TABLES:
        if table in tables:
            rows = ",\n".join(f"  {json.dumps(_rounded(asdict(row)))}" for row in tables[table])
            lines.append(f' "{table}": [\n{rows}\n ]')
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {name: _rounded(one) for name, one in value.items()}
    return [_rounded(one) for one in value] if isinstance(value, list | tuple) else value
