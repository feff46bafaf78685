"""A full synchronisation: every learner sends a delta of every fragment, all are merged, every learner adopts.

Real processes: `skerry serve` with a durable file:// store, and one process a learner. The limit of the wall-clock time
is writing and syncing as many bytes as the store grew by, to one file on the same disk.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.report import Row, measured
from benchmarks.speed.limits import write_and_sync
from benchmarks.speed.measuring import Size, paired
from benchmarks.speed.models import layout_of
from benchmarks.speed.processes import Child, Served, children, served
from skerry.wire.codecs import Codec


@dataclass(frozen=True)
class Setting:
    """What synchronises; `fragments` 0: as many as the plan makes by itself."""

    learners: int
    numel: int
    codec: Codec = Codec.INT4
    fragments: int = 0

    @property
    def case(self) -> str:
        """Its name in tables."""
        plan = f", {self.fragments} fragments" if self.fragments else ""
        return f"{self.learners} learners, {self.numel / 1e6:.3g}M parameters{plan}, {self.codec} both ways"


@dataclass
class Found:
    """What the samples came to; lists have one number a sample."""

    wall_s: list[float] = field(default_factory=list)
    disk_s: list[float] = field(default_factory=list)
    disk_bytes: list[float] = field(default_factory=list)
    learner_s: list[float] = field(default_factory=list)  # of CPU, mean over learners
    syncer_s: list[float] = field(default_factory=list)  # of CPU
    bytes_up: list[float] = field(default_factory=list)  # of all learners
    bytes_down: list[float] = field(default_factory=list)
    wire_bytes: list[float] = field(default_factory=list)  # both ways, as the syncer counted messages
    peak_bytes: float = 0.0  # of a learner, beyond its weights
    joined_bytes: float = 0.0
    syncer_peak_bytes: float = 0.0


def measure(setting: Setting, samples: int) -> Found:
    """Synchronises once to warm up and then `samples` times, each beside a write of as many bytes."""
    found = Found()
    with tempfile.TemporaryDirectory(prefix="skerry-benchmark-") as name, served(Path(name)) as syncer:
        arguments = [
            f"--target={syncer.target} --number={number} --learners={setting.learners} --numel={setting.numel} "
            f"--codec={setting.codec} --fragments={setting.fragments}".split()
            for number in range(setting.learners)
        ]
        with children("island", arguments, Path(name)) as islands:
            found.joined_bytes = max(island.hear()["joined_bytes"] for island in islands)
            for sample in range(samples + 1):
                _all(islands, "prepare")
                syncer.wait_idle()
                _synchronise(syncer, islands, found if sample else Found(), Path(name))
            found.syncer_peak_bytes = syncer.peak_bytes()
    return found


def _synchronise(syncer: Served, islands: Sequence[Child], found: Found, folder: Path) -> None:
    cpu_s, wire_bytes, disk_bytes = syncer.cpu_s(), _wire_bytes(syncer), syncer.store_bytes()
    answers = _all(islands, "synchronise")
    syncer.wait_idle()
    found.wall_s.append(max(one["end_s"] for one in answers) - min(one["start_s"] for one in answers))
    found.learner_s.append(statistics.mean(one["cpu_s"] for one in answers))
    found.syncer_s.append(syncer.cpu_s() - cpu_s)
    found.bytes_up.append(sum(one["bytes_up"] for one in answers))
    found.bytes_down.append(sum(one["bytes_down"] for one in answers))
    found.wire_bytes.append(_wire_bytes(syncer) - wire_bytes)
    found.peak_bytes = max(found.peak_bytes, *(one["peak_bytes"] for one in answers))
    found.disk_bytes.append(syncer.store_bytes() - disk_bytes)
    start_s = time.perf_counter()
    write_and_sync(folder, int(found.disk_bytes[-1]))
    found.disk_s.append(time.perf_counter() - start_s)


def _all(islands: Sequence[Child], command: str) -> list[Any]:
    for island in islands:
        island.tell(do=command)
    return [island.hear() for island in islands]


def _wire_bytes(syncer: Served) -> float:
    return syncer.total("skerry_rpc_received_bytes_total") + syncer.total("skerry_rpc_sent_bytes_total")


def rows_of(setting: Setting, found: Found) -> Iterator[Row]:
    """Yields the rows of one setting."""
    case, numel = setting.case, layout_of(setting.numel).numel
    contributed = setting.learners * numel
    yield paired(case, "wall time / write and sync of the store's bytes", found.wall_s, "s", limits=found.disk_s)
    yield measured(case, "CPU of a learner, a parameter", [1e9 * one / numel for one in found.learner_s], "ns")
    yield measured(
        case, "CPU of the syncer, a contributed parameter", [1e9 * one / contributed for one in found.syncer_s], "ns"
    )
    yield measured(case, "bytes on the wire, both ways", [one / 1e6 for one in found.wire_bytes], "MB")
    up, down = found.bytes_up, found.bytes_down
    bits = [8 * (one + other) / contributed for one, other in zip(up, down, strict=True)]
    yield measured(case, "bits a parameter, both ways together", bits, "bits")
    yield measured(case, "bytes to disk", [one / 1e6 for one in found.disk_bytes], "MB")
    peak, joined = found.peak_bytes / 4 / numel, found.joined_bytes / 4 / numel
    yield measured(case, "peak memory of a learner beyond its weights / float32 size", [peak], "")
    yield measured(case, "the same while it joins / float32 size", [joined], "")


def rows(size: Size) -> Iterator[Row]:
    """Two learners, with int4 and with float32 both ways."""
    numel = size.pick(50_300_000, 5_000_000)
    for codec in (Codec.INT4, Codec.FLOAT32):
        setting = Setting(2, numel, codec)
        yield from rows_of(setting, measure(setting, size.samples))


def growth_rows(size: Size) -> Iterator[Row]:
    """How the cost grows with learners, fragments and parameters, from a small model on."""
    base = size.pick(8_000_000, 1_000_000)
    settings = (
        *(Setting(learners, base, fragments=8) for learners in (1, 2, 4)),
        *(Setting(2, base, fragments=fragments) for fragments in (2, 32)),
        *(Setting(2, factor * base, fragments=8) for factor in (2, 4)),
    )
    for setting in settings:
        rows_of_all = rows_of(setting, measure(setting, max(3, size.samples - 2)))
        # The memory of so small a model is that of the process.
        yield from (row for row in rows_of_all if "float32 size" not in row.metric)
