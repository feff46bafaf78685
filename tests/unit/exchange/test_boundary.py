"""Work that waits for a step boundary: how much of it a step does, and what becomes of its errors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from skerry.errors import StopExchangingError
from skerry.exchange.boundary import BUDGET_S, Boundary
from tests.support.still_clock import StillClock


class World:
    """A boundary on the running loop, whose clock moves as work takes time."""

    def __init__(self) -> None:
        self.clock = StillClock()
        self.boundary = Boundary(self.clock, asyncio.get_running_loop().call_soon)
        self.done: list[str] = []

    async def queue(self, name: str, takes_s: float = 0.0) -> asyncio.Future[str]:
        """Queues work that says its name and takes some time."""

        def work() -> str:
            self.clock.now_s += takes_s
            self.done.append(name)
            return name

        return await self.start(work)

    async def start(self, work: Callable[[], str]) -> asyncio.Future[str]:
        """Queues work."""
        running = asyncio.ensure_future(self.boundary.run(work))
        await asyncio.sleep(0)
        return running


async def test_a_step_does_waiting_work_in_its_order_and_hands_the_results_back() -> None:
    world = World()
    first, second = await world.queue("first"), await world.queue("second")
    assert world.done == []
    world.boundary.work()
    assert world.done == ["first", "second"]
    assert [await first, await second] == ["first", "second"]


async def test_work_beyond_the_budget_waits_for_the_next_step_and_one_piece_is_always_done() -> None:
    world = World()
    for name, share in (("a", 0.75), ("b", 0.75), ("c", 3.0), ("d", 0.0)):
        await world.queue(name, share * BUDGET_S)
    steps = []
    for _ in range(3):
        world.boundary.work()
        steps.append("".join(world.done))
    assert steps == ["ab", "abc", "abcd"]


async def test_work_whose_caller_has_gone_is_not_done() -> None:
    world = World()
    (await world.queue("nobody's")).cancel()
    await asyncio.sleep(0)
    world.boundary.work()
    assert world.done == []


async def test_an_error_of_the_work_is_the_callers_and_an_interrupt_the_training_threads_too() -> None:
    def fail() -> str:
        raise ValueError("no room")

    def interrupt() -> str:
        raise KeyboardInterrupt

    world = World()
    failed, interrupted = await world.start(fail), await world.start(interrupt)
    with pytest.raises(KeyboardInterrupt):
        world.boundary.work()
    with pytest.raises(ValueError, match="no room"):
        await failed
    with pytest.raises(StopExchangingError) as stopped:
        await interrupted
    assert stopped.value.reason == "INTERRUPTED"


async def test_who_waits_without_steps_does_the_work_as_it_comes_until_it_is_over_or_late() -> None:
    world = World()
    await world.queue("first")
    assert world.boundary.serve(lambda: world.done == ["first"], timeout_s=5.0)
    assert not world.boundary.serve(lambda: False, timeout_s=0.0)
    world.boundary.wake()
    answers = iter([False, False, True])
    assert world.boundary.serve(lambda: next(answers), timeout_s=0.01)
