"""The byte budget bounds the parts in memory, and every push makes progress."""

from __future__ import annotations

import asyncio
import random

import numpy as np

from skerry.runtime.clock import SystemClock
from skerry.v1 import exchange_pb2 as exchange
from skerry_syncer.run.host import HostSettings
from skerry_syncer.run.parts import ByteBudget
from skerry_syncer.server import ServerSettings, serving
from skerry_syncer.store.objects.opening import open_objects
from tests.simulation.virtual_time import VirtualClock, run_virtual
from tests.support.raw_learner import FLOAT32, RawLearner, connected, create_run, pull


def _budget(limit_bytes: int = 100) -> ByteBudget:
    return ByteBudget(limit_bytes, SystemClock())


async def test_parts_within_the_budget_do_not_wait() -> None:
    budget = _budget()
    one, two = await budget.reserve("a", 60), await budget.reserve("b", 40)
    assert budget.used_bytes == 100
    one.release()
    two.release()
    assert (budget.used_bytes, budget.peak_bytes) == (0, 100)


async def test_a_part_that_does_not_fit_waits_until_it_does() -> None:
    budget = _budget()
    first = await budget.reserve("a", 80)
    waiting = asyncio.create_task(budget.reserve("b", 40))
    await asyncio.wait([waiting], timeout=0.01)
    assert not waiting.done()
    first.release()
    await waiting
    assert budget.used_bytes == 40


async def test_a_part_that_is_larger_than_the_budget_is_let_in_alone() -> None:
    budget = _budget()
    first = await budget.reserve("a", 10)
    waiting = asyncio.create_task(budget.reserve("b", 300))
    behind = asyncio.create_task(budget.reserve("c", 10))
    await asyncio.wait([waiting, behind], timeout=0.01)
    assert not waiting.done()
    assert not behind.done(), "smaller parts must not overtake it for ever"
    first.release()
    large = await waiting
    assert not behind.done()
    large.release()
    await behind


async def test_who_gives_up_waiting_holds_nothing_and_holds_up_nobody() -> None:
    budget = _budget()
    first = await budget.reserve("a", 50)
    hasty = asyncio.create_task(budget.reserve("b", 60))
    patient = asyncio.create_task(budget.reserve("c", 50))
    await asyncio.wait([hasty, patient], timeout=0.01)
    hasty.cancel()
    await patient
    assert budget.used_bytes == 100
    granted = asyncio.create_task(budget.reserve("d", 50))
    await asyncio.sleep(0)
    first.release()  # grants it, in the moment in which it is cancelled
    granted.cancel()
    await asyncio.wait([granted])
    assert budget.used_bytes == 50


def test_a_sender_that_held_memory_for_longer_comes_after_one_that_held_it_for_less() -> None:
    async def main() -> list[str]:
        budget, order = ByteBudget(100, VirtualClock()), list[str]()

        async def part(sender: str, at_s: float, held_s: float) -> None:
            await asyncio.sleep(at_s)
            reserved = await budget.reserve(sender, 100)
            order.append(sender)
            await asyncio.sleep(held_s)
            reserved.release()

        await asyncio.gather(part("slow", 0, 10), part("other", 1, 5), part("slow", 11, 10), part("fast", 12, 1))
        return order

    assert run_virtual(main) == ["slow", "other", "fast", "slow"]


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
        assert server.host.budget.peak_bytes == 64 * base.values.size, "one part of a size that was not stated"
        assert server.host.budget.used_bytes == 0
