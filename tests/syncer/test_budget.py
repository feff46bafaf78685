"""The byte budget bounds the parts in memory, and every push makes progress."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from skerry.store.objects.opening import open_objects
from skerry.syncer.host import HostSettings
from skerry.syncer.parts import ByteBudget, Grant
from skerry.syncer.server import ServerSettings, serving
from skerry.v1 import exchange_pb2 as exchange
from tests.syncer.raw_learner import FLOAT32, RawLearner, connected, create_run, pull


@contextmanager
def granted(budget: ByteBudget) -> Iterator[Grant]:
    """Yields a grant that is released at the end, as a push does with its own."""
    grant = budget.grant()
    try:
        yield grant
    finally:
        grant.release()


async def test_grants_within_the_budget_do_not_wait() -> None:
    budget = ByteBudget(100)
    with granted(budget) as one, granted(budget) as two:
        await one.take(60)
        await two.take(40)
        assert budget.used_bytes == 100
    assert budget.used_bytes == 0


async def test_what_is_over_the_budget_waits_until_something_is_given_back() -> None:
    budget = ByteBudget(100)
    first, second = budget.grant(), budget.grant()
    await first.take(80)
    waiting = asyncio.create_task(second.take(40))
    await asyncio.wait([waiting], timeout=0.01)
    assert not waiting.done()
    first.release()
    await waiting
    assert budget.used_bytes == 40


async def test_parts_that_each_hold_half_do_not_wait_for_one_another() -> None:
    budget = ByteBudget(100)

    async def part() -> None:
        with granted(budget) as grant:
            for _ in range(8):
                await grant.take(10)
                await asyncio.sleep(0)

    async with asyncio.timeout(5):
        await asyncio.gather(*(part() for _ in range(20)))
    assert budget.used_bytes == 0
    assert budget.peak_bytes <= 100 + 80, "the budget and one part"


async def test_who_gives_up_waiting_holds_nothing() -> None:
    budget = ByteBudget(100)

    async def hasty() -> None:
        async with asyncio.timeout(0.01):
            with granted(budget) as grant:
                await grant.take(1)

    with granted(budget) as first:
        await first.take(100)
        with pytest.raises(TimeoutError):
            await hasty()
        assert budget.used_bytes == 100
    assert budget.used_bytes == 0


async def test_pushes_that_share_a_small_budget_are_all_accepted(store_url: str) -> None:
    settings = ServerSettings(listen="127.0.0.1:0", host=HostSettings(part_budget_bytes=2_000))
    async with serving(open_objects(store_url), settings) as server, connected(server.port) as stubs:
        run, _ = await create_run(stubs)
        base = await pull(stubs, run, "body")
        values = np.random.default_rng(1).standard_normal(base.values.size).astype(np.float32)

        async def push(name: str) -> exchange.PushDeltaResponse:
            learner = RawLearner(stubs, run, name, random.Random(name))
            await learner.attach()
            answer = await learner.push(learner.header(base, "body"), values, FLOAT32)
            learner.detach()
            return answer

        answers = await asyncio.gather(*(push(f"learner-{at}") for at in range(12)))
        assert {answer.state for answer in answers} == {exchange.PUSH_STATE_ACCEPTED}
        part_bytes = 2 * 4 * base.values.size  # float32, and the copy that is joined
        assert server.host.budget.peak_bytes <= 2_000 + part_bytes + 1_000
        assert server.host.budget.used_bytes == 0
