"""What a replica's requests of the object store cost in a month, counted in hours of virtual time."""

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine

import pytest

from skerry.wire.policy import Policy
from skerry_syncer.run.host import HostSettings, RunHost
from skerry_syncer.store.log.entries import Item, PolicyItem, RunStatus, SessionItem, StatusItem
from skerry_syncer.store.store import Store
from skerry_syncer.store.versions.scratch import Scratch
from tests.simulation.virtual_time import run_virtual
from tests.support.history import accepted, snapshot
from tests.support.log_bench import SPEC, UID, Bench

COUNTED_S = 7200.0
MONTH_S = 30 * 86_400.0
# S3's list prices in its cheapest regions; deleting is free.
PRICES = {"create": 5e-6, "write": 5e-6, "list": 5e-6, "folders": 5e-6, "get": 0.4e-6, "stream": 0.4e-6}


class HostBench(Bench):
    """A replica's host over a store that counts requests, and a second writer of the same run."""

    def __init__(self) -> None:
        super().__init__()
        self.host = RunHost(self.store(), scratch=Scratch(None), settings=HostSettings())

    async def create(self, *, has_open_round: bool) -> Store:
        """Makes an open run, in which a delta may wait for a second learner's; returns the writer's store."""
        writer = self.store()
        log = (await writer.create_draft(SPEC)).log
        items: list[Item] = [
            PolicyItem(self.entropy.hex_id(), Policy(quorum_count=2)),
            snapshot(0),
            StatusItem(RunStatus.OPEN),
            SessionItem("east", "s" * 32, ""),
        ]
        if has_open_round:
            items.append(accepted("a" * 32, "east", session="s" * 32))
        assert all(outcome.rejection is None for outcome in await log.append(items))
        await writer.publish("run", UID)
        return writer

    async def month_dollars(self) -> float:
        """Lets an hour pass, counts the requests of the time after it, and returns what a month of them costs."""
        await asyncio.sleep(3600)
        before = Counter(self.operations)
        await asyncio.sleep(COUNTED_S)
        dollars = sum(PRICES.get(name, 0) * count for name, count in (self.operations - before).items())
        return dollars * MONTH_S / COUNTED_S


def on_host(test: Callable[[HostBench, Store], Coroutine[None, None, None]], *, has_open_round: bool = False) -> None:
    """Runs a test beside a host that serves a run, of which the test has the other writer's store."""

    async def main() -> None:
        bench = HostBench()
        writer = await bench.create(has_open_round=has_open_round)
        async with bench.host.serving():
            await asyncio.sleep(1.0)
            await test(bench, writer)

    run_virtual(main)


@pytest.mark.parametrize(("has_open_round", "limit"), [(False, 0.5), (True, 2.0)], ids=["idle", "waiting"])
def test_a_run_in_which_nothing_happens_costs_cents(has_open_round: bool, limit: float) -> None:
    async def test(bench: HostBench, _: Store) -> None:
        replica = await bench.host.open("run")
        with replica.followers.following():
            assert 0 < await bench.month_dollars() < limit

    on_host(test, has_open_round=has_open_round)


def test_a_run_that_nobody_follows_or_that_was_deleted_costs_nothing() -> None:
    async def test(bench: HostBench, writer: Store) -> None:
        await bench.host.open("run")
        await writer.unpublish("run", UID)
        assert await bench.month_dollars() == 0
        assert not bench.host.store._runs, "its log is let go"

    on_host(test, has_open_round=True)


def test_a_start_looks_at_every_run_and_wakes_none() -> None:
    """A host of 500 quiet runs spent 13 s of processor time after its start on looking for what nobody had written."""

    async def test(bench: HostBench, _: Store) -> None:
        assert ("run", UID) in bench.host._runs
        before = Counter(bench.operations)
        await asyncio.sleep(20.0)
        assert (bench.operations - before).total() < 5

    on_host(test)


def test_news_of_a_quiet_run_have_its_leases_shared_within_a_term() -> None:
    """After a start within a run that others serve, their entries come before a learner's call does."""

    async def test(bench: HostBench, writer: Store) -> None:
        log = (await writer.open_run("run", UID)).log
        await log.append([bench.policy()])
        await asyncio.sleep(30.0)
        replica = await bench.host.open("run")
        await replica.attach(SessionItem("west", "w" * 32, ""))
        before = bench.operations["write"]
        await asyncio.sleep(log.state.policy.lease_term_s)
        assert bench.operations["write"] > before

    on_host(test)


def test_a_call_wakes_a_run_that_was_quiet() -> None:
    async def test(bench: HostBench, writer: Store) -> None:
        replica = await bench.host.open("run")
        with replica.followers.following():
            await asyncio.sleep(3600)
            log = (await writer.open_run("run", UID)).log
            await log.append([bench.policy()])
            await asyncio.sleep(1.0)
            assert replica.state.position < log.state.position, "nobody looked yet"
            await bench.host.open("run")
            await asyncio.sleep(0.1)
            assert replica.state.position == log.state.position

    on_host(test)


def test_a_run_that_was_let_go_is_opened_again_with_all_that_was_seen_of_it() -> None:
    async def test(bench: HostBench, _: Store) -> None:
        first = await bench.host.open("run")
        await asyncio.sleep(600)
        again = await bench.host.open("run")
        assert again is not first
        assert (again.state.position, again.log.known) == (first.state.position, first.log.known)

    on_host(test)
