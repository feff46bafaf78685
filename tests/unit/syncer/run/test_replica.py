"""A run on one replica: what it does beside calls, while the store fails, another replica acts, or it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from skerry.runtime.clock import SystemClock
from skerry.wire.policy import Policy
from skerry_syncer.merge.merger import Merger
from skerry_syncer.run.replica import RunReplica
from skerry_syncer.settings import ReplicaSettings
from skerry_syncer.store.errors import StoreUnavailableError
from skerry_syncer.store.log.entries import INITIAL_BASE
from skerry_syncer.store.versions.run import Run
from skerry_syncer.store.versions.scratch import Scratch
from tests.support.dict_objects import DictObjects
from tests.support.heard_logs import heard_logs
from tests.support.history import accepted
from tests.support.hooked_objects import HookedObjects
from tests.support.log_bench import SPEC, store_on
from tests.support.merge_driver import FRAGMENT, Driver, layout_of

LAYOUT = layout_of((4,))


@asynccontextmanager
async def served(run: Run) -> AsyncIterator[RunReplica]:
    """Yields a replica that serves the run; it is ended at the end."""
    settings = ReplicaSettings(retry_s=0.0, longest_retry_s=0.0)
    replica = RunReplica(run, scratch=Scratch(None), settings=settings)
    task = asyncio.create_task(replica.run())
    try:
        yield replica
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def test_a_merge_whose_store_failed_is_over_when_another_replica_has_committed_it() -> None:
    """Else its outer state stays in memory until this replica merges again, which may be never."""
    objects = HookedObjects()
    driver = await Driver.start(LAYOUT, Policy(lease_term_s=5.0), objects=objects)
    other = Merger(driver.run, driver.scratch)

    async def merge_elsewhere() -> None:
        closing = driver.log.state.fragments[FRAGMENT].closing
        assert closing is not None
        objects.hooks.clear()
        await other.merge(closing)
        raise StoreUnavailableError("not now")

    objects.hooks["before write", "/updates/"] = merge_elsewhere
    with heard_logs() as lines:
        async with served(driver.run) as replica, asyncio.timeout(5):
            replica.leases.renew("m0", "0" * 32, SystemClock().monotonic_s())
            await driver.push(0, [1, 2, 3, 4])
            while [line["event"] for line in lines].count("version committed") < 2:  # the other's, and what this kept
                await asyncio.sleep(0)
        assert [line["event"] for line in lines].count("merge failed") == 1


@pytest.mark.parametrize("turn_count", range(4))
async def test_initial_weights_that_come_while_a_replica_ends_are_acknowledged(turn_count: int) -> None:
    run = await store_on(DictObjects()).create_draft(SPEC)
    pushed = accepted("d" * 32, "eu", base=INITIAL_BASE)
    async with served(run):
        for _ in range(10):
            await asyncio.sleep(0)
        appending = asyncio.create_task(run.log.append([pushed]))
        for _ in range(turn_count):
            await asyncio.sleep(0)
    assert (await appending)[0].rejection is None
