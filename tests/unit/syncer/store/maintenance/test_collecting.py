"""A collection deletes what no kept version takes, says so in the log first, and touches nothing else."""

from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest

from skerry.wire.policy import Policy
from skerry_syncer.merge.outer_states import OuterStates
from skerry_syncer.merge.rollback import stored_again
from skerry_syncer.store.errors import ObjectMissingError, StoreUnavailableError, UnreadableObjectError
from skerry_syncer.store.maintenance.checking import verify_run
from skerry_syncer.store.maintenance.collecting import collect, plan_collection
from skerry_syncer.store.objects.interface import Objects
from skerry_syncer.store.objects.opening import open_objects
from skerry_syncer.store.versions.replay import Replayer, UnreadableDeltaError
from skerry_syncer.store.versions.run import Run
from skerry_syncer.store.versions.scratch import Scratch
from tests.support.dict_objects import DictObjects
from tests.support.hooked_objects import HookedObjects
from tests.support.log_bench import store_on
from tests.support.merge_driver import FRAGMENT, INT4, Driver, layout_of

Happening = Callable[[], Awaitable[object]]
Read = Callable[[Run], Awaitable[None]]
DAY_S = 86_400.0
NOW_S = 100 * DAY_S  # objects of DictObjects are of day 0


async def trained(round_count: int, objects: Objects) -> Driver:
    """Returns a run of so many rounds of two learners, with a snapshot of every third version."""
    values = np.random.Generator(np.random.PCG64(0))
    driver = await Driver.start(layout_of((4, 4), (3,)), Policy(update_encoding=INT4), objects=objects)
    for number in range(1, round_count + 1):
        await driver.round([await driver.push(who, 0.01 * values.standard_normal(19)) for who in (0, 1)])
        if number % 3 == 0:
            await driver.snapshot()
    return driver


async def collected(driver: Driver, kept_version_count: int, *, now_unix_s: float = NOW_S) -> list[str]:
    """Collects all but so many versions, and litter that is older than a day; returns the names of what went."""
    policy = Policy(kept_version_count=kept_version_count, kept_hours=0, kept_day_count=0)
    went = await collect(driver.log, await plan_collection(driver.log, policy, litter_before_unix_s=now_unix_s - DAY_S))
    return [victim.name.removeprefix(f"{driver.log.prefix}/") for victim in went.victims]


async def test_names_are_condemned_before_any_is_deleted_and_a_collection_that_died_then_is_finished() -> None:
    objects = HookedObjects()
    driver = await trained(4, objects)
    deleted: list[str] = []

    async def die() -> None:
        deleted.extend(driver.log.state.condemned)
        raise StoreUnavailableError("gone")

    objects.hooks["before delete", ""] = die
    with pytest.raises(StoreUnavailableError):
        await collected(driver, 1)
    objects.hooks.clear()
    position = driver.log.state.position
    assert sorted(await collected(driver, 1)) == sorted(deleted) != []
    assert driver.log.state.position == position
    assert driver.log.state.condemned == set(deleted)


async def test_pending_deltas_and_frozen_sets_stay() -> None:
    driver = await trained(2, DictObjects())
    frozen = await driver.push(0, np.ones(19, np.float32))
    await driver.close([frozen])
    pending = await driver.push(1, np.ones(19, np.float32))
    went = await collected(driver, 1, now_unix_s=NOW_S + DAY_S)
    assert {part.name for delta in (frozen, pending) for part in delta.parts}.isdisjoint(went)


async def test_litter_goes_only_when_it_is_old() -> None:
    driver = await trained(1, DictObjects(unix=lambda: NOW_S))
    stray = await driver.run.blobs.write_part(FRAGMENT, "e" * 32, 0, 19, "0" * 64, [0.0, 0.0], [b"never accepted"])
    assert await collected(driver, 9, now_unix_s=NOW_S + DAY_S / 2) == []
    assert await collected(driver, 9, now_unix_s=NOW_S + 2 * DAY_S) == [stray.ref.name]
    assert stray.ref.name in driver.log.state.condemned


async def test_files_that_a_crash_left_in_a_folder_are_swept(tmp_path: Path) -> None:
    driver = await Driver.start(layout_of((4,)), Policy(), objects=open_objects(f"file://{tmp_path}/store"))
    left = tmp_path / "store" / "temporary" / ("f" * 32)
    left.write_bytes(b"half")
    went = await collected(driver, 9, now_unix_s=left.stat().st_mtime + 2 * DAY_S)
    assert went == [f"temporary/{left.name}"]
    assert not left.exists()


async def _verify(run: Run) -> None:
    report = await verify_run(run, scratch=Scratch(None))
    assert report.problems == ()
    assert report.versions_checked > 0


async def _weights(run: Run) -> None:
    await Replayer(run, FRAGMENT).weights_at(run.state.fragments[FRAGMENT].version)


async def _cold_replica(run: Run) -> None:
    fragment = run.state.fragments[FRAGMENT]
    await OuterStates(run, Scratch(None)).take(fragment, fragment.version)


async def _roll_back(run: Run) -> None:
    fragment = run.state.fragments[FRAGMENT]
    await stored_again(run, fragment, fragment.newest)


async def race(driver: Driver, read: Read, happen: Happening) -> None:
    """Lets a process read that knows the log as it is now, with something happening in between."""
    assert isinstance(driver.objects, DictObjects)
    objects = HookedObjects(driver.objects)

    async def happen_once() -> None:
        objects.hooks.clear()
        await happen()

    objects.hooks["before stream", ""] = happen_once
    run = await store_on(objects).open_run(driver.log.spec.name, driver.log.spec.uid)
    try:
        await read(run)
    except ObjectMissingError:
        assert not run.blobs.unreadable
        raise
    assert not run.blobs.unreadable


readers = pytest.mark.parametrize("read", [_verify, _weights, _cold_replica, _roll_back])


@readers
async def test_a_collection_takes_the_way_that_a_reader_goes_and_it_takes_another(read: Read) -> None:
    driver = await trained(8, DictObjects())

    async def happen() -> None:
        await driver.snapshot()
        assert any("snapshots/" in name for name in await collected(driver, 1))

    await race(driver, read, happen)


@readers
async def test_what_a_collection_takes_from_a_reader_was_collected_and_is_not_damaged(
    read: Read,
) -> None:
    driver = await trained(8, DictObjects())

    async def happen() -> None:
        for number in range(4):
            await driver.round([await driver.push(0, np.full(19, 0.01 * number, np.float32))])
        await driver.snapshot()
        await collected(driver, 1)

    if read is _verify:
        await race(driver, read, happen)
    else:
        with pytest.raises(ObjectMissingError, match="collected"):
            await race(driver, read, happen)


@readers
async def test_an_object_that_nobody_condemned_is_missing_though_a_collection_runs(read: Read) -> None:
    driver = await trained(8, DictObjects())

    async def happen() -> None:
        await collected(driver, 8)
        names = [info.name async for info in driver.objects.list(driver.log.prefix)]
        await driver.objects.delete([name for name in names if "/updates/" in name or "/deltas/" in name])

    with pytest.raises((AssertionError, UnreadableObjectError, UnreadableDeltaError)):
        await race(driver, read, happen)
