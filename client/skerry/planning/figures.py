"""What the speed benchmark measured of Skerry: `figures.json`, which `python -m benchmarks.speed --keep` writes."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from importlib.resources import files
from itertools import pairwise
from typing import Final

from skerry.wire.codecs import Codec

# By table of the benchmark, case and metric.
Tables = dict[str, dict[str, dict[str, float]]]
TABLES: Final = ("synchronisation", "trainer", "memory")


@dataclass(frozen=True)
class Figures:
    """What one parameter or one version costs, with one codec both ways."""

    bits: float  # of a parameter, each way
    learner_cpu_s: float  # of a parameter, for each synchronisation
    syncer_cpu_s: float  # of a parameter of a learner, for each synchronisation
    learner_memory: float  # beyond training, as a multiple of the float32 size of what is trained
    step_s: float  # in `step()`, for each parameter of which it starts and ends an exchange
    put_count: float  # requests that write to the store, for a version of a fragment by one learner
    get_count: float  # requests that read from the store, likewise
    log_bytes: float  # likewise
    syncer_bytes: tuple[tuple[float, float], ...]  # fragment's float32 size, and memory with two learners
    syncer_learner_bytes: float  # more for each further learner

    def syncer_memory_bytes(self, fragment_bytes: float, learner_count: int) -> float:
        """Returns a syncer's memory with one merge at work, on the straight line through the two nearest sizes."""
        (x0, y0), (x1, y1) = next(
            (pair for pair in pairwise(self.syncer_bytes) if fragment_bytes <= pair[1][0]), self.syncer_bytes[-2:]
        )
        memory_bytes = y0 + (fragment_bytes - x0) * (y1 - y0) / (x1 - x0)
        return memory_bytes + max(0, learner_count - 2) * self.syncer_learner_bytes


def measured(codec: Codec, tables: Tables | None = None) -> Figures:
    """Returns the figures of a codec; memory, `step()` and requests are those of the default, int4."""
    tables = tables or json.loads(files(__package__).joinpath("figures.json").read_text(encoding="utf-8"))
    case, pair = next((case, row) for case, row in tables["synchronisation"].items() if f", {codec} both" in case)
    learners, numel = _number("learners", case), 1e6 * _number("parameters", case)
    ((rest, trainer),) = tables["trainer"].items()
    step_numel = 1e6 * _number("parameters", rest) / _number("fragments", rest)
    memory = [
        (_number("learners", case), 4e6 * _number("parameters", case), 1e6 * next(iter(row.values())))
        for case, row in tables["memory"].items()
    ]
    sizes = sorted((size, memory_bytes) for count, size, memory_bytes in memory if count == 2)
    most = max(memory)
    least_bytes = next(memory_bytes for size, memory_bytes in sizes if size == most[1])
    return Figures(
        bits=8e6 * pair["bytes on the wire, both ways"] / (2 * learners * numel),
        learner_cpu_s=1e-9 * pair["CPU of a learner, a parameter"],
        syncer_cpu_s=1e-9 * pair["CPU of the syncer, a contributed parameter"],
        learner_memory=trainer["peak memory beyond training / float32 size"],
        step_s=1e-3 * trainer["time in step(), median / step"] / step_numel,
        put_count=trainer["requests that write, a version of a fragment"],
        get_count=trainer["requests that read, a version of a fragment"],
        log_bytes=trainer["bytes of the log, a version of a fragment"],
        syncer_bytes=tuple(sizes),
        syncer_learner_bytes=(most[2] - least_bytes) / (most[0] - 2),
    )


def _number(unit: str, case: str) -> float:
    """Returns the number before a word in a case's name: of "2 learners, 50.3M parameters" that of learners is 2."""
    match = re.search(rf"([\d.]+)M? {unit}", case)
    assert match is not None, "benchmarks name their cases so"
    return float(match[1])
