"""Objects that are lost or damaged are noticed when they are read, named, and gone around where there is a way."""

from __future__ import annotations

import numpy as np
import pytest

from skerry.runtime.clock import SystemClock
from skerry.runtime.identifiers import SystemEntropy
from skerry_syncer.merge.merger import Merger
from skerry_syncer.store.errors import UnreadableObjectError
from skerry_syncer.store.log.entries import CollectedItem, ObjectRef
from skerry_syncer.store.versions.replay import Replayer
from skerry_syncer.store.versions.run import Run
from tests.support.dict_objects import DictObjects
from tests.support.merge_driver import FRAGMENT, Driver
from tests.unit.syncer.store.versions.test_replay import LAYOUT, NO_FILES, assert_same_bits, trained


async def snapshot_refs(driver: Driver, version: int) -> list[ObjectRef]:
    """Returns weights, momentum and residual of a version's snapshot."""
    at = driver.log.state.fragments[FRAGMENT].versions[version]
    return [*at.weights, *at.outer]


@pytest.mark.parametrize("part", [0, 1, 2], ids=["weights", "momentum", "residual"])
@pytest.mark.parametrize("is_lost", [False, True], ids=["flipped", "lost"])
async def test_a_damaged_snapshot_is_gone_around_by_an_older_one(part: int, is_lost: bool) -> None:
    driver = await trained(3, snapshot_at=3)
    name = (await snapshot_refs(driver, 3))[part].name
    if is_lost:
        await driver.objects.delete([f"{driver.log.prefix}/{name}"])
    else:
        await driver.damage(name)
    rebuilt = await Replayer(driver.run, FRAGMENT, driver.workers).rebuild(3, NO_FILES)
    assert_same_bits(rebuilt, driver.state)
    weights = await Replayer(driver.run, FRAGMENT, driver.workers).weights_at(3)
    assert weights.tobytes() == driver.state.weights.tobytes()


async def test_where_no_snapshot_is_left_one_is_named_and_all_are_tried_again() -> None:
    driver = await trained(3, snapshot_at=2)
    replayer = Replayer(driver.run, FRAGMENT, driver.workers)
    names = [refs.name for version in (0, 2) for refs in await snapshot_refs(driver, version)]
    kept = {name: await driver.objects.get(f"{driver.log.prefix}/{name}") for name in names}
    for name in names:
        await driver.damage(name)
    for _ in range(2):
        with pytest.raises(UnreadableObjectError) as caught:
            await replayer.rebuild(3, NO_FILES)
        assert caught.value.name in names
        with pytest.raises(UnreadableObjectError):
            await replayer.weights_at(3)
    for name, data in kept.items():
        await driver.objects.delete([f"{driver.log.prefix}/{name}"])
        await driver.objects.write(f"{driver.log.prefix}/{name}", data)
    assert_same_bits(await replayer.rebuild(3, NO_FILES), driver.state)
    assert not driver.run.blobs.unreadable


async def test_a_damaged_update_is_named() -> None:
    driver = await trained(2)
    commit = driver.log.state.fragments[FRAGMENT].versions[2].commit
    assert commit is not None
    await driver.damage(commit.commit.update[0].name)
    with pytest.raises(UnreadableObjectError) as caught:
        await Replayer(driver.run, FRAGMENT, driver.workers).weights_at(2)
    assert caught.value.name == commit.commit.update[0].name


class ReadObjects(DictObjects):
    """A store that remembers what was read from it."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[str] = []

    def _data(self, name: str) -> bytes:
        self.read.append(name)
        return super()._data(name)


@pytest.mark.parametrize("is_collected", [False, True])
async def test_a_replica_that_was_away_takes_the_newest_snapshot_and_no_delta_before_it(is_collected: bool) -> None:
    objects = ReadObjects()
    driver = await Driver.start(LAYOUT, (await trained(0)).log.state.policy, objects=objects)
    late = Run(
        objects,
        driver.log.spec,
        clock=SystemClock(),
        entropy=SystemEntropy(),
        workers=driver.workers,
        writer="late",
    )
    merger = Merger(late, workers=driver.workers, scratch=NO_FILES)
    values = np.ones(LAYOUT.numel)

    async def merge_late() -> None:
        closing = await driver.close([await driver.push(0, values)])
        await late.log.tail()
        await merger.merge(closing)
        await driver.log.tail()
        driver.state = await Replayer(driver.run, FRAGMENT, driver.workers).rebuild(closing.version, NO_FILES)

    await merge_late()  # its cache has version 1 now
    missed = [await driver.push(0, values) for _ in range(1)]
    await driver.round(missed)
    missed.append(await driver.push(0, values))
    await driver.round(missed[1:])
    await driver.snapshot()
    names = [part.name for delta in missed for part in delta.parts]
    if is_collected:
        await driver.append(CollectedItem(tuple(names)))
        await objects.delete([f"{driver.log.prefix}/{name}" for name in names])
    objects.read.clear()
    await merge_late()
    assert late.state.fragments[FRAGMENT].version == 4
    assert not set(objects.read) & {f"{driver.log.prefix}/{name}" for name in names}
