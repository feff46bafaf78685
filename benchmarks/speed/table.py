"""The tables of this benchmark, what is aimed at in each, and the committed file."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from benchmarks.report import Row
from benchmarks.speed.measuring import Size
from skerry.planning.figures import Figures
from skerry.wire.codecs import Codec

TABLES: Final = {
    "codec": "one core: quantise, decode, encode",
    "transfer": "push of encoded parts and pull of a snapshot, loopback",
    "merge": "eight int4 deltas of 100M parameters",
    "synchronisation": "two learners, int4 and float32 both ways, real processes",
    "trainer": "what the training thread notices, 100M parameters",
    "fleet": "64 trainers on one syncer",
    "memory": "a syncer's peak memory by learners and fragment size",
    "bits": "bits a parameter on real training deltas",
}
COMMITTED: Final = Path(__file__).parent / "results" / "rows.json"
# What `skerry plan` reads, which is installed with it.
FIGURES: Final = Path(str(files("skerry.planning"))) / "figures.json"
_WIRE: Final = "bytes on the wire, both ways"
PICTURE: Final = Path(__file__).parents[2] / "docs" / "speed.png"


@dataclass(frozen=True)
class Aim:
    """What a row should show: a bound on its ratio to the limit, or on its value."""

    table: str
    metric: str
    bound: float
    is_at_most: bool = True
    is_ratio: bool = True
    case: str = ""  # a part of the case's name; empty: all cases of the metric

    def share(self, table: str, row: Row) -> float | None:
        """Returns how many times over this row shows it, 1 just so; None if it is not this row's."""
        found = row.ratio if self.is_ratio else row.value
        if (table, row.metric) != (self.table, self.metric) or self.case not in row.case or not found:
            return None
        return self.bound / found if self.is_at_most else found / self.bound

    def __str__(self) -> str:
        """The bound as the picture has it."""
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
    # Imported here, so that a look at committed rows needs neither torch nor a syncer.
    return list(import_module(f"benchmarks.speed.{table}").rows(size))


def read(path: Path) -> dict[str, list[Row]]:
    """Returns the rows that `write` wrote, by table; none if there is no such file."""
    if not path.exists():
        return {}
    content: dict[str, list[dict[str, Any]]] = json.loads(path.read_text(encoding="utf-8"))
    return {table: [Row(**row) for row in rows] for table, rows in content.items()}


def write(path: Path, tables: Mapping[str, list[Row]]) -> None:
    """Writes the rows of all tables, each on a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [
        f' "{table}": [\n' + ",\n".join(f"  {json.dumps(asdict(row), ensure_ascii=False)}" for row in rows) + "\n ]"
        for table, rows in tables.items()
    ]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def planned(tables: Mapping[str, list[Row]]) -> dict[str, Figures]:
    """Returns what `skerry plan` reads, by codec."""
    values = {(table, row.case, row.metric): row.value for table in tables for row in tables[table]}
    rest = next(row.case for row in tables["trainer"])
    step_numel = 1e6 * _number("parameters", rest) / _number("fragments", rest)
    memory = [
        (_number("learners", row.case), 4e6 * _number("parameters", row.case), 1e6 * row.value)
        for row in tables["memory"]
    ]
    sizes = sorted((size, memory_bytes) for count, size, memory_bytes in memory if count == 2)
    most_count, size, most_bytes = max(memory)
    figures = {}
    for codec in Codec:
        pair = next(row.case for row in tables["synchronisation"] if f", {codec} both" in row.case)
        numel = 1e6 * _number("parameters", pair)
        figures[str(codec)] = Figures(
            bits=8e6 * values["synchronisation", pair, _WIRE] / (2 * _number("learners", pair) * numel),
            learner_cpu_s=1e-9 * values["synchronisation", pair, "CPU of a learner, a parameter"],
            syncer_cpu_s=1e-9 * values["synchronisation", pair, "CPU of the syncer, a contributed parameter"],
            learner_memory=values["trainer", rest, "peak memory beyond training / float32 size"],
            step_s=1e-3 * values["trainer", rest, "time in step(), median / step"] / step_numel,
            put_count=values["trainer", rest, "requests that write, a version of a fragment"],
            get_count=values["trainer", rest, "requests that read, a version of a fragment"],
            log_bytes=values["trainer", rest, "bytes of the log, a version of a fragment"],
            syncer_bytes=tuple(sizes),
            syncer_learner_bytes=(most_bytes - dict(sizes)[size]) / (most_count - 2),
        )
    return figures


def _number(unit: str, case: str) -> float:
    """Returns the number before a word in a case's name: of "2 learners, 50.3M parameters" that of learners is 2."""
    match = re.search(rf"([\d.]+)M? {unit}", case)
    assert match is not None, "cases are named so"
    return float(match[1])


def write_figures(tables: Mapping[str, list[Row]]) -> None:
    """Writes FIGURES anew."""
    figures = {codec: asdict(each) for codec, each in planned(tables).items()}
    FIGURES.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
