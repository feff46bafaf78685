"""A collection deletes what no kept version takes, says so in the log first, and touches nothing else."""

import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from skerry.runtime.clock import SystemClock
from skerry.runtime.workers import InlineWorkers
from skerry.wire.policy import Policy
from skerry_syncer.merge.outer_states import OuterStates
from skerry_syncer.merge.rollback import stored_again
from skerry_syncer.store.errors import ObjectMissingError, StoreUnavailableError, UnreadableObjectError
from skerry_syncer.store.maintenance.checking import verify_run
from skerry_syncer.store.maintenance.collecting import (
    CollectionPlan,
    Why,
    collect,
    plan_collection,
)
from skerry_syncer.store.objects.opening import open_objects
from skerry_syncer.store.versions.replay import Replayer, UnreadableDeltaError
from skerry_syncer.store.versions.run import Run
from skerry_syncer.store.versions.scratch import Scratch
from tests.support.dict_objects import DictObjects
from tests.support.merge_driver import FRAGMENT, INT4, Driver, layout_of
from tests.support.seeded_entropy import SeededEntropy

DAY_S = 86_400.0
NOW_S = 100 * DAY_S  # objects of DictObjects are of day 0


def keeping(version_count: int) -> Policy:
    """Returns a policy that keeps so many versions, and no weights of others."""
    return Policy(kept_version_count=version_count, kept_hours=0, kept_day_count=0)


def plan_of(driver: Driver, policy: Policy, *, now_unix_s: float = NOW_S) -> Callable[[], Awaitable[CollectionPlan]]:
    """Returns what plans a collection that takes litter older than a day."""
    return partial(plan_collection, driver.log, policy, litter_before_unix_s=now_unix_s - DAY_S)


async def trained(round_count: int, *, snapshot_every: int = 3, objects: DictObjects | None = None) -> Driver:
    """Returns a run of so many rounds of two learners."""
    values = np.random.Generator(np.random.PCG64(0))
    driver = await Driver.start(layout_of((4, 4), (3,)), Policy(update_encoding=INT4), objects=objects)
    for number in range(1, round_count + 1):
        deltas = [await driver.push(who, 0.01 * values.standard_normal(19)) for who in (0, 1)]
        await driver.round(deltas)
        if number % snapshot_every == 0:
            await driver.snapshot()
    return driver


async def stored_names(driver: Driver) -> set[str]:
    return {info.name.removeprefix(f"{driver.log.prefix}/") async for info in driver.objects.list(driver.log.prefix)}


def reasons(plan: CollectionPlan) -> set[Why]:
    return {victim.why for victim in plan.victims}


async def test_a_plan_changes_nothing() -> None:
    driver = await trained(4)
    before, position = await stored_names(driver), driver.log.state.position
    plan = await plan_of(driver, keeping(1))()
    assert plan.victims
    assert (await stored_names(driver), driver.log.state.position) == (before, position)


async def test_the_kept_versions_stay_whole_and_older_ones_go() -> None:
    driver = await trained(9)
    went = await collect(driver.log, plan_of(driver, keeping(2)))
    assert reasons(went) == {Why.UNNEEDED}
    for version in (8, 9):
        await Replayer(driver.run, FRAGMENT, InlineWorkers()).rebuild(version, Scratch(None))
    with pytest.raises(ObjectMissingError):
        await Replayer(driver.run, FRAGMENT, InlineWorkers()).weights_at(4)
    report = await verify_run(driver.run, workers=InlineWorkers(), scratch=Scratch(None))
    assert report.problems == ()
    again = await collect(driver.log, plan_of(driver, keeping(2)))
    assert again.victims == ()


async def test_names_are_condemned_before_any_is_deleted_and_a_collection_that_died_then_is_finished() -> None:
    driver = await trained(4)
    assert isinstance(driver.objects, DictObjects)

    class Dying(DictObjects):
        async def delete(self, names: Sequence[str]) -> None:
            assert set(names) == {f"{driver.log.prefix}/{name}" for name in driver.log.state.condemned}
            raise StoreUnavailableError("gone")

    driver.log.objects = Dying()
    driver.log.objects.objects = driver.objects.objects
    with pytest.raises(StoreUnavailableError):
        await collect(driver.log, plan_of(driver, keeping(1)))
    driver.log.objects = driver.objects
    went = await collect(driver.log, plan_of(driver, keeping(1)))
    assert reasons(went) == {Why.CONDEMNED}


async def test_pending_deltas_and_frozen_sets_stay() -> None:
    driver = await trained(2)
    frozen = await driver.push(0, np.ones(19, np.float32))
    await driver.close([frozen])
    pending = await driver.push(1, np.ones(19, np.float32))
    await collect(driver.log, plan_of(driver, keeping(1), now_unix_s=NOW_S + DAY_S))
    assert {part.name for delta in (frozen, pending) for part in delta.parts} <= await stored_names(driver)


async def test_litter_goes_only_when_it_is_old() -> None:
    objects = DictObjects(unix=lambda: NOW_S)
    driver = await trained(1, objects=objects)
    stray = await driver.run.blobs.write_part(FRAGMENT, "e" * 32, 0, 19, "0" * 64, [0.0, 0.0], [b"never accepted"])
    young = await plan_of(driver, Policy(), now_unix_s=NOW_S + DAY_S / 2)()
    assert young.victims == ()
    went = await collect(driver.log, plan_of(driver, Policy(), now_unix_s=NOW_S + 2 * DAY_S))
    assert [(victim.name, victim.why) for victim in went.victims] == [(stray.ref.name, Why.LITTER)]
    assert stray.ref.name in driver.log.state.condemned


async def test_files_that_a_crash_left_in_a_folder_are_swept(tmp_path: Path) -> None:
    driver = await Driver.start(layout_of((4,)), Policy(), objects=open_objects(f"file://{tmp_path}/store"))
    left = tmp_path / "store" / "temporary" / ("f" * 32)
    left.write_bytes(b"half")
    went = await collect(driver.log, plan_of(driver, Policy(), now_unix_s=left.stat().st_mtime + 2 * DAY_S))
    assert [victim.why for victim in went.victims] == [Why.TEMPORARY]
    assert not left.exists()


class Interrupted(DictObjects):
    """What a reader sees of another's objects; once, before it reads a blob, something happens to them."""

    def __init__(self, shared: DictObjects, happen: Callable[[], Awaitable[object]]) -> None:
        super().__init__()
        self.objects = shared.objects
        self._happen: Callable[[], Awaitable[object]] | None = happen

    async def stream(self, name: str, *, offset: int = 0) -> AsyncIterator[bytes]:
        happen, self._happen = self._happen, None
        if happen is not None:
            await happen()
        async for piece in super().stream(name, offset=offset):
            yield piece


async def reader_of(driver: Driver, happen: Callable[[], Awaitable[object]]) -> Run:
    """Returns the run as another process has read it, in whose next read of a blob something happens."""
    assert isinstance(driver.objects, DictObjects)
    objects = Interrupted(driver.objects, happen)
    entropy = SeededEntropy(random.Random(1))
    run = Run(objects, driver.log.spec, clock=SystemClock(), entropy=entropy, workers=InlineWorkers(), writer="reader")
    await run.log.tail()
    return run


async def _verify(run: Run) -> None:
    report = await verify_run(run, workers=InlineWorkers(), scratch=Scratch(None))
    assert report.problems == ()
    assert report.versions_checked > 0


async def _weights(run: Run) -> None:
    fragment = run.state.fragments[FRAGMENT]
    await Replayer(run, FRAGMENT, InlineWorkers()).weights_at(fragment.version)


async def _cold_replica(run: Run) -> None:
    fragment = run.state.fragments[FRAGMENT]
    await OuterStates(run, InlineWorkers(), Scratch(None)).take(fragment, fragment.version)


async def _roll_back(run: Run) -> None:
    fragment = run.state.fragments[FRAGMENT]
    await stored_again(run, fragment, fragment.newest, InlineWorkers())


READERS = [_verify, _weights, _cold_replica, _roll_back]


@pytest.mark.parametrize("read", READERS)
async def test_a_collection_takes_the_way_that_a_reader_goes_and_it_takes_another(
    read: Callable[[Run], Awaitable[None]],
) -> None:
    driver = await trained(8)

    async def happen() -> None:
        await driver.snapshot()
        went = await collect(driver.log, plan_of(driver, keeping(1)))
        assert any("snapshots/" in victim.name for victim in went.victims)

    run = await reader_of(driver, happen)
    await read(run)
    assert not run.blobs.unreadable


@pytest.mark.parametrize("read", READERS)
async def test_what_a_collection_takes_from_a_reader_was_collected_and_is_not_damaged(
    read: Callable[[Run], Awaitable[None]],
) -> None:
    driver = await trained(8)

    async def happen() -> None:
        for number in range(4):
            await driver.round([await driver.push(0, np.full(19, 0.01 * number, np.float32))])
        await driver.snapshot()
        await collect(driver.log, plan_of(driver, keeping(1)))

    run = await reader_of(driver, happen)
    if read is _verify:
        await read(run)
    else:
        with pytest.raises(ObjectMissingError, match="collected"):
            await read(run)
    assert not run.blobs.unreadable


@pytest.mark.parametrize("read", READERS)
async def test_an_object_that_nobody_condemned_is_missing_though_a_collection_runs(
    read: Callable[[Run], Awaitable[None]],
) -> None:
    driver = await trained(8)

    async def happen() -> None:
        await collect(driver.log, plan_of(driver, keeping(8)))
        assert isinstance(driver.objects, DictObjects)
        for name in [name for name in driver.objects.objects if "/updates/" in name or "/deltas/" in name]:
            del driver.objects.objects[name]

    run = await reader_of(driver, happen)
    with pytest.raises((AssertionError, UnreadableObjectError, UnreadableDeltaError)):
        await read(run)
