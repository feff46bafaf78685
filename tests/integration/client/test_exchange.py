"""The exchange itself, on the test's own event loop, over a link that fails as each test says."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from skerry import MergeRule, OuterOptimizer, OuterSchedule, RunsClient
from skerry.errors import is_transient
from skerry.exchange.boundary import Boundary
from skerry.exchange.loop import ExchangeLoop
from skerry.exchange.session import Calls
from skerry.exchange.settings import ExchangeSettings
from skerry.model.interface import ArrayParameters
from skerry.net.retry import Retry, RetrySettings
from skerry.runtime.clock import SystemClock
from skerry.runtime.identifiers import SystemEntropy
from skerry.runtime.workers import InlineWorkers
from skerry.wire import Codec, Encoding
from tests.support.faulty_transport import Faults, FaultyTransport
from tests.support.quadratic import QUICK, Quadratic

SETTINGS = ExchangeSettings(run="fit", learner_id="a", create=True, policy=QUICK)
_QUICK_RETRY = Retry(RetrySettings(first_wait_s=0.01, longest_wait_s=0.05), random.Random(0), is_transient)


class World:
    """One learner on a bad link, trained by the test."""

    def __init__(self, target: str, faults: Faults, settings: ExchangeSettings, rules: dict[str, Any]) -> None:
        self.target = target
        self.problem = Quadratic()
        self.transport = FaultyTransport(target, faults)
        self.parameters = ArrayParameters(self.problem.arrays)
        self.workers = InlineWorkers()
        self.exchange = ExchangeLoop(
            Calls(self.transport, _QUICK_RETRY, **rules),
            self.parameters,
            settings,
            workers=self.workers,
            entropy=SystemEntropy(),
            boundary=Boundary(SystemClock(), asyncio.get_running_loop().call_soon_threadsafe),
        )

    async def train_until(self, is_over: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not is_over():
                loss = await asyncio.to_thread(self.problem.descend)
                self.exchange.step(8, loss)

    async def merged_delta_ids(self) -> list[str]:
        """Closes the run and returns every delta that the log has merged: as many as were acknowledged."""
        merged = await asyncio.to_thread(_close_and_list, self.target)
        # An answer may still be on its way; no delta may be counted that the log has not.
        await self.train_until(lambda: self.exchange.stats.deltas_acknowledged >= len(merged))
        assert self.exchange.stats.deltas_acknowledged == len(merged)
        return merged


def _close_and_list(target: str) -> list[str]:
    with RunsClient(target) as client:
        run = client.close_run("fit")
        versions = [record for fragment in run.fragments for record in client.list_versions("fit", fragment.name)]
    return [fate.delta_id for record in versions for fate in record.merged]


@asynccontextmanager
async def training(
    target: str, faults: Faults, settings: ExchangeSettings = SETTINGS, **rules: Any
) -> AsyncIterator[World]:
    world = World(target, faults, settings, rules)
    await world.exchange.join()
    running = asyncio.ensure_future(world.exchange.run())
    try:
        await world.exchange.wait_attached()
        yield world
    finally:
        await world.exchange.leave()
        await running
        await world.transport.close()


@pytest.mark.parametrize("lane_bytes", [Calls.lane_bytes, 600])
async def test_over_a_bad_link_every_delta_is_merged_once_and_every_version_adopted(
    target: str, lane_bytes: int
) -> None:
    faults = Faults()
    async with training(target, faults, lane_bytes=lane_bytes) as world:
        # Small parts, so that some are durable when a push breaks: header, then begin, data and end of each part.
        world.exchange._session.part_size_bytes = 512
        faults.lost_acknowledgements, faults.corrupt_pulls = 5, 3
        faults.push_cuts, faults.pull_cuts = [1, 3, 4, 8, 11, 2], [0, 1, 1, 2, 0, 1]
        await world.train_until(lambda: not (faults.lost_acknowledgements or faults.push_cuts or faults.corrupt_pulls))
        before = max(world.exchange.stats.versions.values())
        await world.train_until(lambda: min(world.exchange.stats.versions.values()) >= before + 3)
        assert world.exchange.stats.failure is None
        merged = await world.merged_delta_ids()
        assert len(merged) == len(set(merged))
        assert set(merged) <= set(world.transport.delta_ids)
        # A delta that was cut keeps its id, for its bytes stay the same.
        assert len(world.transport.delta_ids) > len(set(world.transport.delta_ids))


@pytest.mark.parametrize("codec", [Codec.FLOAT32, Codec.INT4])
async def test_with_plain_averaging_a_lone_learner_trains_as_if_it_were_alone(target: str, codec: Codec) -> None:
    """Each version is then the last minus the learner's own delta, so what rebase adds must come to nothing."""
    outer = OuterOptimizer(learning_rate=1.0, momentum=0.0, schedule=OuterSchedule.CONSTANT)
    encoding = Encoding(codec, vector_codec=Codec.FLOAT32)
    exact = Encoding(Codec.FLOAT32)
    policy = replace(QUICK, outer=outer, merge=MergeRule.MEAN, delta_encoding=encoding, update_encoding=exact)
    async with training(target, Faults(), replace(SETTINGS, policy=policy)) as world:
        await world.train_until(lambda: min(world.exchange.stats.versions.values()) >= 6)
        alone = Quadratic()
        for _ in range(world.exchange.stats.step_count):
            alone.descend()
        for name, array in world.problem.arrays.items():
            np.testing.assert_allclose(array, alone.arrays[name], atol=1e-5)


@pytest.mark.parametrize("error", [TypeError("a defect"), asyncio.CancelledError()], ids=["error", "cancelled"])
@pytest.mark.parametrize("place", ["transport.attach", "transport.push_delta", "workers.run", "parameters.add"])
async def test_no_defect_ends_the_exchange_silently(
    target: str, place: str, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    async with training(target, Faults(attach_cuts=[0] * 1000 if place == "transport.attach" else [])) as world:
        await world.train_until(lambda: world.exchange.stats.deltas_merged >= 2)
        part, method = place.split(".")
        monkeypatch.setattr(getattr(world, part), method, fail)
        await world.train_until(lambda: world.exchange.stats.failure is not None)
        assert getattr(world.exchange.stats.failure, "reason", "") == "DEFECT"
        assert not world.exchange.stats.is_attached
        world.exchange.step(8)  # training goes on
