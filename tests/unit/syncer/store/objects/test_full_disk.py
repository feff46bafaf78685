"""A store on a disk that is really full still collects, and training goes on."""

import asyncio
import errno
from collections.abc import Awaitable, Iterator
from pathlib import Path

import click
import numpy as np
import pytest

from skerry.cli.export import export
from skerry.runtime.clock import SystemClock
from skerry.runtime.identifiers import SystemEntropy
from skerry.runtime.workers import InlineWorkers
from skerry.wire.policy import Policy
from skerry_syncer.run.upkeep import keep_small
from skerry_syncer.settings import ReplicaSettings
from skerry_syncer.store.errors import StoreFullError
from skerry_syncer.store.log.entries import AcceptedItem, PolicyItem
from skerry_syncer.store.objects.local import RESERVE, FileSystem, LocalObjects
from skerry_syncer.store.objects.opening import open_objects
from tests.support.merge_driver import Driver, layout_of
from tests.support.small_disk import fill, small_disk
from tests.unit.syncer.store.make_golden import GOLDEN

WHOLE_RESERVE = 2**24
NUMEL = 2**17  # half a mebibyte of float32
BOUNDED = Policy(kept_version_count=1, kept_hours=0, kept_day_count=0)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk") as folder:
        yield folder


async def filled(disk: Path) -> Driver:
    """Returns a run that trained until its store had no space for a delta."""
    objects = open_objects(f"file://{disk}/store", reserve=True)
    driver = await Driver.start(layout_of((1, NUMEL)), Policy(), objects=objects)
    await driver.append(PolicyItem("bounded", BOUNDED))
    try:
        while True:
            await driver.round([await pushed(driver)])
            await driver.snapshot()
    except StoreFullError:
        pass
    with pytest.raises(StoreFullError):
        await pushed(driver)
    return driver


async def pushed(driver: Driver) -> AcceptedItem:
    return await driver.push(0, np.full(NUMEL, 0.01, np.float32))


async def test_a_collection_on_a_full_disk_begins_in_the_reserve_and_training_goes_on(disk: Path) -> None:
    driver = await filled(disk)
    fill(disk)
    version, went_wrong = driver.state.version, []
    is_full = driver.run.blobs.is_full

    async def attempt(work: Awaitable[object], failure: str) -> bool:
        try:
            await work
        except StoreFullError as error:
            went_wrong.append(f"{failure}: {error}")
        return not went_wrong

    assert is_full
    upkeep = asyncio.create_task(keep_small(driver.run, SystemClock(), ReplicaSettings(), attempt))
    while driver.run.blobs.is_full:
        await asyncio.sleep(0.01)
    upkeep.cancel()
    assert went_wrong == []
    assert driver.log.state.condemned
    assert (disk / "store" / RESERVE).stat().st_size == WHOLE_RESERVE, "for the next time"
    for _ in range(3):
        await driver.round([await pushed(driver)])
    assert driver.state.version >= version + 3


class FullFileSystem(FileSystem):
    """Has no space but for what the reserve has given up."""

    def __init__(self, reserve: Path) -> None:
        self._reserve = reserve

    def write(self, descriptor: int, data: bytes | memoryview) -> None:
        if not self._reserve.exists() or self._reserve.stat().st_size == WHOLE_RESERVE:
            raise OSError(errno.ENOSPC, "No space left on device")
        super().write(descriptor, data)


async def test_only_log_entries_are_given_the_space_of_the_reserve(tmp_path: Path) -> None:
    full = FullFileSystem(tmp_path / RESERVE)
    objects = LocalObjects(tmp_path, workers=InlineWorkers(), entropy=SystemEntropy(), file_system=full)
    with pytest.raises(StoreFullError):
        await objects.create("runs/run/log/1", b"an entry")
    objects.fill_reserve()
    with pytest.raises(StoreFullError):
        await objects.write("runs/run/deltas/1", b"a part")
    await objects.create("runs/run/log/1", b"an entry")
    assert await objects.get("runs/run/log/1") == b"an entry"
    assert 0 < (tmp_path / RESERVE).stat().st_size < WHOLE_RESERVE
    await objects.delete(["runs/run/deltas/0"])
    assert (tmp_path / RESERVE).stat().st_size == WHOLE_RESERVE


def test_an_export_to_a_full_disk_says_so_and_leaves_nothing(disk: Path) -> None:
    fill(disk)
    out = disk / "out.safetensors"
    with pytest.raises(click.BadParameter, match=r"No space left on device\. path=.*/out\.safetensors"):
        export.main(["--store", f"file://{GOLDEN}/store", "golden", "--out", str(out)], standalone_mode=False)
    assert [path.name for path in disk.iterdir()] == ["of others"]
