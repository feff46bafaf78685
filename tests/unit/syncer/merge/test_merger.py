"""A merge changes the outer state before its commit is durable: whatever comes between, no version is made of it."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from msgspec import structs

from skerry.algorithm.step import OuterState
from skerry.wire.policy import MergeRule, OuterOptimizer, Policy
from skerry_syncer.merge.merger import Merger
from skerry_syncer.store.errors import StoreFullError, StoreUnavailableError
from skerry_syncer.store.log.entries import ClosedItem, Decided, Fate
from skerry_syncer.store.versions.replay import Replayer, UnreadableDeltaError
from skerry_syncer.store.versions.scratch import Scratch
from tests.support.hooked_objects import HookedObjects
from tests.support.merge_driver import FRAGMENT, INT4, Driver, layout_of

LAYOUT = layout_of((30, 40), (7,))
POLICY = Policy(
    merge=MergeRule.MEAN, outer=OuterOptimizer(learning_rate=4.0), update_encoding=INT4, quarantine_ratio=0.0
)


def update_count(objects: HookedObjects) -> int:
    """Returns how many objects of updates are stored."""
    return sum("/updates/" in name for name in objects.objects)


class Run:
    """A run of which one merger makes every version."""

    def __init__(self, driver: Driver, objects: HookedObjects, monkeypatch: pytest.MonkeyPatch) -> None:
        self.driver = driver
        self.objects = objects
        self.merger = Merger(driver.run, driver.scratch)
        self.rebuilt: list[int] = []
        rebuild = Replayer.rebuild

        async def counted(replayer: Replayer, version: int, scratch: Scratch) -> OuterState:
            self.rebuilt.append(version)
            return await rebuild(replayer, version, scratch)

        monkeypatch.setattr(Replayer, "rebuild", counted)

    @property
    def version(self) -> int:
        """The newest version."""
        return self.driver.log.state.fragments[FRAGMENT].version

    async def closed(self, *sizes: float) -> ClosedItem:
        """Freezes a set of a delta of each size, of a learner each."""
        rng = np.random.default_rng(self.driver.delta_count)
        values = [np.float64(size) * rng.uniform(0.5, 1, LAYOUT.numel) for size in sizes]
        return await self.driver.close([await self.driver.push(nth, value) for nth, value in enumerate(values)])

    async def merge(self, closing: ClosedItem) -> None:
        """Merges a frozen set, again while the store fails."""
        while True:
            try:
                await self.merger.merge(closing)
            except (StoreUnavailableError, StoreFullError):
                continue
            break
        self.driver.state.version = self.version

    async def close_again(self, closing: ClosedItem) -> ClosedItem:
        """Freezes the set's first delta in its place."""
        members, left_out = closing.members[:1], closing.members[1:]
        decided = tuple(Decided(member.delta, Fate.EXPIRED, "UNREADABLE") for member in left_out)
        again = ClosedItem(FRAGMENT, closing.version, closing.attempt + 1, members, 1.0, decided, closing.length)
        await self.driver.append(again)
        return again

    async def check(self, version: int) -> None:
        """Has one more version made, and all replayed from what is stored."""
        await self.merge(await self.closed(1.0, 2.0))
        assert self.version == version + 1
        report = await self.driver.verify()
        assert (report.problems, report.versions_replayed) == ((), version + 1)


@pytest.fixture
async def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """A run with one version, whose state the merger has cached."""
    objects = HookedObjects()
    one = Run(await Driver.start(LAYOUT, POLICY, objects=objects), objects, monkeypatch)
    await one.merge(await one.closed(1.0, 3.0))
    assert (one.version, one.rebuilt) == (1, [0])
    one.rebuilt.clear()
    return one


@pytest.mark.parametrize("error", [StoreUnavailableError, StoreFullError])
@pytest.mark.parametrize(
    "moment", [("before write", "/updates/"), ("before create", "/log/"), ("after create", "/log/")]
)
async def test_a_store_that_fails_after_the_step_is_tried_again_with_the_same_update(
    run: Run, moment: tuple[str, str], error: type[Exception]
) -> None:
    failures, count = 3, update_count(run.objects)

    async def fail() -> None:
        nonlocal failures
        failures -= 1
        if failures >= 0:
            raise error("not now")

    closing = await run.closed(1.0, 2.0)
    run.objects.hooks[moment] = fail
    await run.merge(closing)
    run.objects.hooks.clear()
    assert (run.version, run.rebuilt, update_count(run.objects) - count) == (2, [], 1)
    assert failures < 3
    await run.merge(await run.closed(1.0, 2.0))
    assert run.rebuilt == []
    await run.check(3)


async def test_objects_that_are_stored_are_not_stored_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skerry_syncer.merge.merger.UPDATE_OBJECT_SPANS", 1)
    objects, writes = HookedObjects(), 0
    layout = layout_of((2100, 1000))  # three spans
    run = Run(await Driver.start(layout, POLICY, objects=objects), objects, monkeypatch)

    async def fail_the_second() -> None:
        nonlocal writes
        writes += 1
        if writes == 2:
            raise StoreUnavailableError("not now")

    objects.hooks["before write", "/updates/"] = fail_the_second
    await run.merge(await run.driver.close([await run.driver.push(0, np.ones(layout.numel))]))
    assert (run.version, update_count(objects), writes) == (1, 3, 4)


async def test_a_version_of_other_arithmetic_that_another_replica_made_costs_the_state(run: Run) -> None:
    closing = await run.closed(1.0, 2.0)

    async def overtake() -> None:
        run.objects.hooks.clear()
        run.driver.state = await run.driver.replayer().rebuild(1, run.driver.scratch)
        result = await run.driver.merge(closing)
        scalars = structs.replace(result.commit.scalars, rate="3f000000")
        await run.driver.append(structs.replace(await result.stored(), scalars=scalars))

    run.objects.hooks["before write", "/updates/"] = overtake
    await run.merge(closing)
    assert run.version == 2
    with run.merger._states.reading(run.driver.log.state.fragments[FRAGMENT]) as kept:
        assert kept is None


async def test_a_snapshot_that_begins_while_deltas_are_read_is_of_no_half_made_version(run: Run) -> None:
    closing, taken = await run.closed(1.0, 2.0), []

    async def take_snapshot() -> None:
        run.objects.hooks.clear()
        with run.merger._states.reading(run.driver.log.state.fragments[FRAGMENT]) as outer:
            taken.append(outer)
        await run.merger.snapshot(FRAGMENT)

    run.objects.hooks["before stream", "/deltas/"] = take_snapshot
    await run.merge(closing)
    assert (run.version, taken) == (2, [None])
    await run.check(2)


async def test_a_set_that_is_closed_again_after_the_step_costs_the_state_and_nothing_else(run: Run) -> None:
    closing = await run.closed(1.0, 2.0)
    again: list[ClosedItem] = []

    async def close_again() -> None:
        run.objects.hooks.clear()
        again.append(await run.close_again(closing))

    run.objects.hooks["before write", "/updates/"] = close_again
    await run.merge(closing)
    assert run.version == 1
    await run.merge(again[0])
    assert (run.version, run.rebuilt) == (2, [1])
    await run.check(2)


async def test_a_merge_that_is_cancelled_after_the_step_leaves_no_state_behind(run: Run) -> None:
    closing, is_stuck = await run.closed(1.0, 2.0), asyncio.Event()

    async def be_stuck() -> None:
        is_stuck.set()
        await asyncio.Event().wait()

    run.objects.hooks["before write", "/updates/"] = be_stuck
    merging = asyncio.create_task(run.merge(closing))
    await is_stuck.wait()
    merging.cancel()
    await asyncio.gather(merging, return_exceptions=True)
    run.objects.hooks.clear()
    await run.merge(closing)
    assert (run.version, run.rebuilt) == (2, [1])
    await run.check(2)


async def test_the_largest_delta_below_is_merged(run: Run) -> None:
    await run.merge(await run.closed(1.0, 1e28))
    await run.check(2)


@pytest.mark.parametrize(
    ("size", "limit", "rebuilt"),
    [
        pytest.param(1.5e29, 2.0**200, [], id="before the step"),
        pytest.param(3e38, np.inf, [1], id="in the step, whose state is lost"),
    ],
)
async def test_a_delta_that_is_too_large_is_named(
    run: Run, monkeypatch: pytest.MonkeyPatch, size: float, limit: float, rebuilt: list[int]
) -> None:
    monkeypatch.setattr("skerry_syncer.merge.merger._LARGEST_SQUARED_NORM", limit)
    closing = await run.closed(1.0, size)
    with pytest.raises(UnreadableDeltaError) as raised:
        await run.merge(closing)
    assert raised.value.delta == closing.members[1].delta
    await run.merge(await run.close_again(closing))
    assert (run.version, run.rebuilt) == (2, rebuilt)
    await run.check(2)


async def test_a_damaged_delta_before_a_snapshot_costs_the_cached_state_and_nothing_else(run: Run) -> None:
    run.driver.state = await run.driver.replayer().rebuild(1, run.driver.scratch)
    await run.driver.round([await run.driver.push(0, np.ones(LAYOUT.numel))])  # by another replica
    await run.driver.snapshot()
    await run.driver.damage(run.driver.part_names(2)[0])
    run.rebuilt.clear()
    await run.merge(await run.closed(1.0, 2.0))
    assert (run.version, run.rebuilt) == (3, [2])
