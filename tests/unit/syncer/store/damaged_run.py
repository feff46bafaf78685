"""A real run in a folder, with a name, made by real merges; and the ways in which a disk or a person damages it."""

from __future__ import annotations

import asyncio
import functools
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from skerry.cli.main import cli
from skerry.runtime.clock import SystemClock
from skerry.runtime.workers import InlineWorkers
from skerry.wire.policy import Policy
from skerry_syncer.store.log.state import RunState, VersionState
from skerry_syncer.store.objects.opening import open_objects
from skerry_syncer.store.store import Store
from skerry_syncer.store.versions.run import Run
from tests.support.merge_driver import FRAGMENT, INT4, Driver, layout_of
from tests.support.seeded_entropy import SeededEntropy

LAYOUT = layout_of((6, 6), (4,))


@dataclass
class DamagedRun:
    """The run's folder and its log as it was before any damage."""

    url: str
    folder: Path  # of the run
    state: RunState  # before the damage

    @property
    def position(self) -> int:
        """The log's last position before the damage."""
        return self.state.position

    def version(self, number: int) -> VersionState:
        """Returns a version of the only fragment."""
        return self.state.fragments[FRAGMENT].versions[number]

    def entry(self, position: int) -> Path:
        """Returns the file of a log entry."""
        return self.folder / "log" / f"{position:020}"

    def update(self, version: int) -> Path:
        """Returns the file of a version's update."""
        commit = self.version(version).commit
        assert commit is not None
        return self.folder / commit.commit.update[0].name

    def part(self, delta: str) -> Path:
        """Returns the file of a delta's only part."""
        return self.folder / self.state.deltas[delta].item.parts[0].name

    def member(self, version: int, nth: int = 0) -> str:
        """Returns a delta that went into a version."""
        commit = self.version(version).commit
        assert commit is not None
        return commit.close.members[nth].delta

    def snapshot(self, version: int, kind: str) -> Path:
        """Returns a file of a version's snapshot."""
        refs = (*self.version(version).weights, *self.version(version).outer)
        (name,) = (ref.name for ref in refs if f"-{kind}-" in ref.name)
        return self.folder / name


async def _train(folder: Path, finish: str) -> tuple[str, RunState]:
    url = f"file://{folder}"
    rng = np.random.default_rng(5)
    driver = await Driver.start(LAYOUT, Policy(update_encoding=INT4), objects=open_objects(url))
    for number in range(1, 7):
        deltas = [await driver.push(nth, rng.normal(size=LAYOUT.numel), encoding=INT4) for nth in range(2)]
        await driver.round(deltas, participation=0.5)
        if number in (2, 4):
            await driver.snapshot()
    last = [await driver.push(nth, rng.normal(size=LAYOUT.numel), encoding=INT4) for nth in range(3)]
    if finish == "frozen":
        await driver.close(last, weights=[1.0, 2.0, 1.0], participation=0.8)
    entropy = SeededEntropy(random.Random(1))
    store = Store(driver.objects, clock=SystemClock(), entropy=entropy, workers=InlineWorkers(), writer="test")
    await store.publish(driver.log.spec.name, driver.log.spec.uid)
    await driver.log.close()
    return driver.log.prefix, driver.log.state


@functools.cache
def _trained(finish: str) -> tuple[TemporaryDirectory[str], str, RunState]:
    folder = TemporaryDirectory(prefix="skerry-test-run-")
    return folder, *asyncio.run(_train(Path(folder.name) / "store", finish))


def build(folder: Path, *, finish: str = "pending") -> DamagedRun:
    """Returns a run of six versions, with snapshots of 2 and 4, and three more deltas, `pending` or `frozen`."""
    template, prefix, state = _trained(finish)
    shutil.copytree(Path(template.name) / "store", folder / "store")
    return DamagedRun(f"file://{folder}/store", folder / "store" / prefix, state)


def store_of(run: DamagedRun, seed: int) -> Store:
    """Returns the run's store as a process of its own sees it."""
    entropy = SeededEntropy(random.Random(seed))
    return Store(open_objects(run.url), clock=SystemClock(), entropy=entropy, workers=InlineWorkers(), writer="test")


def reopened(run: DamagedRun) -> RunState:
    """Returns the state that a writer folds, which refuses a damaged log."""

    async def fold() -> Run:
        store = store_of(run, 2)
        opened = await store.open_run("run", "0" * 32)
        await store.close()
        return opened

    return asyncio.run(fold()).state


def called(run: DamagedRun, name: str, *arguments: str) -> int:
    """Runs a command on the run, and returns its exit status."""
    try:
        cli.main([name, "--store", run.url, "run", *arguments], standalone_mode=False)
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def lose(path: Path) -> None:
    """A file is gone."""
    path.unlink()


def empty(path: Path) -> None:
    """A file has no bytes, as after a power cut that an unsynced write did not survive."""
    path.write_bytes(b"")


def tear(path: Path) -> None:
    """A file has its first half, and zeros after it."""
    data = path.read_bytes()
    half = len(data) // 2
    path.write_bytes(data[:half] + bytes(len(data) - half))


def flip(path: Path) -> None:
    """One bit in the middle of a file is wrong."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x80
    path.write_bytes(bytes(data))


def spoil(path: Path) -> None:
    """One bit of a file's last byte is wrong."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


DAMAGES: tuple[Callable[[Path], None], ...] = (lose, empty, tear, spoil)
