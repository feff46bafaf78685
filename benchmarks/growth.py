"""How much a run writes and keeps, by its parameters: `python -m benchmarks.growth`.

Four learners, rounds of H = 24 steps of a second, default policy. Deltas are random, so they compress as badly as any.
The store's own code encodes, merges, stores and collects; only the clock is made up. README.md has the figures.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from typing import Final

import numpy as np

from benchmarks.report import Row, write_rows
from skerry.wire.policy import Policy
from skerry_syncer.store.log import retention
from skerry_syncer.store.log.checkpoints import is_due, write_checkpoint
from skerry_syncer.store.maintenance.collect import collect
from skerry_syncer.store.objects.interface import Chunks
from tests.support.dict_objects import DictObjects
from tests.unit.algorithm.merge_driver import FRAGMENT, Driver, layout_of

NUMEL: Final = 2**18
LEARNER_COUNT: Final = 4
ROUND_COUNT: Final = 320
ROUND_S: Final = 24.0
_DAY_S: Final = 86_400.0
_KINDS: Final = ("deltas", "updates", "snapshots", "log", "checkpoints")


@dataclass
class Clock:
    """A clock that each round moves on."""

    now_s: float = 1.7e9

    def unix_s(self) -> float:
        """Returns the time."""
        return self.now_s

    def monotonic_s(self) -> float:
        """Returns the time."""
        return self.now_s

    async def sleep(self, duration_s: float) -> None:
        """Moves it on."""
        self.now_s += duration_s


class CountedObjects(DictObjects):
    """Counts the bytes that are written, by the folder of a run that they go to."""

    def __init__(self) -> None:
        super().__init__(unix=lambda: 1.7e9)
        self.written: Counter[str] = Counter()

    async def create(self, name: str, data: bytes) -> None:
        """Puts an object, and counts it."""
        await super().create(name, data)
        self.written[kind(name)] += len(data)

    async def write(self, name: str, chunks: Chunks) -> int:
        """Puts a blob, and counts it."""
        size = await super().write(name, chunks)
        self.written[kind(name)] += size
        return size

    def kept(self) -> Counter[str]:
        """Returns the bytes that are there."""
        counts: Counter[str] = Counter()
        for name, (data, _) in self.objects.items():
            counts[kind(name)] += len(data)
        return counts


def kind(name: str) -> str:
    """Returns the folder of a run that an object is in."""
    return (name.split("/") + [""] * 4)[3]


async def measure() -> list[Row]:
    """Trains until what is kept no longer grows, and returns what was written a round and what is there at most."""
    objects, clock, source = CountedObjects(), Clock(), np.random.Generator(np.random.PCG64(0))
    driver = await Driver.start(layout_of((512, NUMEL // 512)), Policy(), objects=objects, clock=clock)
    encoding, since_snapshot, peaks = Policy().delta_encoding, 0, []
    begun = Counter(objects.written)
    for _ in range(ROUND_COUNT):
        await clock.sleep(ROUND_S)
        deltas = [
            await driver.push(who, 0.01 * source.standard_normal(NUMEL), encoding=encoding)
            for who in range(LEARNER_COUNT)
        ]
        commit = await driver.round(deltas)
        since_snapshot += sum(ref.size_bytes for ref in commit.update)
        if since_snapshot >= 4 * NUMEL:
            await driver.snapshot()
            since_snapshot = 0
        if is_due(driver.log.state):
            await write_checkpoint(driver.log)
        peaks.append(sum(objects.kept().values()))
        if retention.is_due(driver.log.state):
            await collect(driver.log, retention.Retention.of(Policy()), now_unix_s=clock.unix_s())
    written = {name: (objects.written[name] - begun[name]) / ROUND_COUNT for name in _KINDS}
    rows = [Row(name, "written a round and parameter", size / NUMEL, "B") for name, size in written.items()]
    a_round = sum(written.values()) / NUMEL
    rows.append(Row("all", "written a round and parameter", a_round, "B"))
    rows.append(Row("all", "kept at most, by parameter", max(peaks[ROUND_COUNT // 2 :]) / NUMEL, "B"))
    rows.append(Row("log", "entries' bytes a round of a fragment", written["log"], "B"))
    rows.append(Row("50M", "written a day", a_round * 50e6 * _DAY_S / ROUND_S / 1e12, "TB"))
    rows.append(Row("50M", "kept at most", max(peaks[ROUND_COUNT // 2 :]) / NUMEL * 50e6 / 1e9, "GB"))
    versions = driver.log.state.fragments[FRAGMENT].versions
    rows.append(Row("all", "versions", float(len(versions)), ""))
    return rows


if __name__ == "__main__":
    write_rows("growth", asyncio.run(measure()))
