"""A store on a full disk still collects, in the space that it set aside, and training goes on."""

import asyncio
import errno
from collections.abc import Awaitable
from pathlib import Path

import numpy as np
import pytest

from skerry.runtime.identifiers import SystemEntropy
from skerry.runtime.workers import InlineWorkers
from skerry.wire.policy import Policy
from skerry_syncer.run.upkeep import keep_small
from skerry_syncer.settings import ReplicaSettings
from skerry_syncer.store.errors import StoreFullError
from skerry_syncer.store.objects.local import RESERVE, FileSystem, LocalObjects
from tests.support.merge_driver import Driver, layout_of

RESERVE_BYTES = 2**24
NUMEL = 2**17  # half a mebibyte of float32


class SmallFileSystem(FileSystem):
    """A disk with room for the reserve and 8 MiB."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.size_bytes = RESERVE_BYTES + 2**23

    def used_bytes(self) -> int:
        return sum(path.stat().st_size for path in self._root.rglob("*") if path.is_file())

    def write(self, descriptor: int, data: bytes | memoryview) -> None:
        if self.used_bytes() + len(data) > self.size_bytes:
            raise OSError(errno.ENOSPC, "No space left on device")
        super().write(descriptor, data)


async def train(driver: Driver, round_count: int) -> None:
    for _ in range(round_count):
        await driver.round([await driver.push(0, np.full(NUMEL, 0.01, np.float32))])
        await driver.snapshot()


async def test_a_collection_on_a_full_disk_begins_in_the_reserve_and_training_goes_on(tmp_path: Path) -> None:
    files = SmallFileSystem(tmp_path)
    objects = LocalObjects(tmp_path, workers=InlineWorkers(), entropy=SystemEntropy(), file_system=files)
    objects.fill_reserve()
    policy = Policy(kept_version_count=1, kept_hours=0, kept_day_count=0)
    driver = await Driver.start(layout_of((1, NUMEL)), policy, objects=objects)
    with pytest.raises(StoreFullError):
        await train(driver, round_count=100)
    files.size_bytes = files.used_bytes()
    with pytest.raises(StoreFullError):
        await objects.write("runs/a/blob", b"x")
    assert (tmp_path / RESERVE).stat().st_size == RESERVE_BYTES, "only log entries are given its space"
    assert driver.run.blobs.is_full
    version = driver.state.version

    async def attempt(work: Awaitable[object], _failure: str) -> bool:
        await work
        return True

    upkeep = asyncio.create_task(keep_small(driver.run, ReplicaSettings(), attempt))
    while driver.run.blobs.is_full and not upkeep.done():
        await asyncio.sleep(0)
    upkeep.cancel()
    assert driver.log.state.condemned
    assert (tmp_path / RESERVE).stat().st_size == RESERVE_BYTES, "for the next time"
    await train(driver, round_count=1)
    assert driver.state.version == version + 1
