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
from typing import Final

from benchmarks.processes import Process, Served, all_hear, children, served
from benchmarks.report import Row, measured
from benchmarks.speed.limits import write_and_sync
from benchmarks.speed.measuring import Size, paired
from benchmarks.speed.models import layout_of
from skerry.wire.codecs import Codec

_LEARNERS: Final = 2


@dataclass
class Found:
    """What the samples came to, one number a sample."""

    wall_s: list[float] = field(default_factory=list)
    disk_s: list[float] = field(default_factory=list)
    disk_bytes: list[float] = field(default_factory=list)
    learner_s: list[float] = field(default_factory=list)  # of CPU, mean over learners
    syncer_s: list[float] = field(default_factory=list)  # of CPU
    wire_bytes: list[float] = field(default_factory=list)  # both ways, as the syncer counted messages


def _measure(numel: int, codec: Codec, samples: int) -> Found:
    """Synchronises once to warm up and then `samples` times, each beside a write of as many bytes."""
    found = Found()
    with tempfile.TemporaryDirectory(prefix="skerry-benchmark-") as name, served(Path(name)) as syncer:
        arguments = [
            f"--target={syncer.target} --number={number} --learners={_LEARNERS} --numel={numel} --codec={codec}".split()
            for number in range(_LEARNERS)
        ]
        with children("benchmarks.speed.island", arguments, Path(name)) as islands:
            for island in islands:
                island.hear()
            for sample in range(samples + 1):
                all_hear(islands, do="prepare")
                syncer.wait_idle()
                _synchronise(syncer, islands, found if sample else Found(), Path(name))
    return found


def _synchronise(syncer: Served, islands: Sequence[Process], found: Found, folder: Path) -> None:
    cpu_s, wire_bytes, disk_bytes = syncer.cpu_s(), _wire_bytes(syncer), syncer.store_bytes()
    answers = all_hear(islands, do="synchronise")
    syncer.wait_idle()
    found.wall_s.append(max(one["end_s"] for one in answers) - min(one["start_s"] for one in answers))
    found.learner_s.append(statistics.mean(one["cpu_s"] for one in answers))
    found.syncer_s.append(syncer.cpu_s() - cpu_s)
    found.wire_bytes.append(_wire_bytes(syncer) - wire_bytes)
    found.disk_bytes.append(syncer.store_bytes() - disk_bytes)
    start_s = time.perf_counter()
    write_and_sync(folder, int(found.disk_bytes[-1]))
    found.disk_s.append(time.perf_counter() - start_s)


def _wire_bytes(syncer: Served) -> float:
    return syncer.total("skerry_rpc_received_bytes_total") + syncer.total("skerry_rpc_sent_bytes_total")


def rows(size: Size) -> Iterator[Row]:
    """Two learners, with each codec both ways."""
    wanted = size.pick(50_300_000, 5_000_000)
    numel = layout_of(wanted).numel
    for codec in (Codec.INT4, Codec.INT8, Codec.FLOAT32):
        found = _measure(wanted, codec, size.samples)
        case = f"{_LEARNERS} learners, {wanted / 1e6:.3g}M parameters, {codec} both ways"
        yield paired(case, "wall time / write and sync of the store's bytes", found.wall_s, "s", limits=found.disk_s)
        learner_ns = [1e9 * seconds / numel for seconds in found.learner_s]
        yield measured(case, "CPU of a learner, a parameter", learner_ns, "ns")
        syncer_ns = [1e9 * seconds / (_LEARNERS * numel) for seconds in found.syncer_s]
        yield measured(case, "CPU of the syncer, a contributed parameter", syncer_ns, "ns")
        yield measured(case, "bytes on the wire, both ways", [count / 1e6 for count in found.wire_bytes], "MB")
        yield measured(case, "bytes to disk", [count / 1e6 for count in found.disk_bytes], "MB")
