"""The exchange itself, on the test's own event loop, with a defect in one of its parts."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest

from skerry.errors import is_transient
from skerry.exchange.boundary import Boundary
from skerry.exchange.loop import ExchangeLoop
from skerry.exchange.session import Calls
from skerry.exchange.settings import ExchangeSettings
from skerry.model.interface import ArrayParameters
from skerry.net.grpc_transport import GrpcTransport
from skerry.net.retry import Retry, RetrySettings
from skerry.runtime.clock import SystemClock
from skerry.runtime.identifiers import SystemEntropy
from skerry.runtime.workers import InlineWorkers
from tests.support.quadratic import QUICK, Quadratic


@pytest.mark.parametrize("error", [TypeError("a defect"), asyncio.CancelledError()], ids=["error", "cancelled"])
@pytest.mark.parametrize("place", ["transport.push_delta", "transport.pull_fragment", "workers.run", "parameters.add"])
async def test_no_defect_ends_the_exchange_silently(
    target: str, place: str, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = Quadratic()
    parts: dict[str, Any] = {
        "transport": GrpcTransport(target),
        "workers": InlineWorkers(),
        "parameters": ArrayParameters(problem.arrays),
    }
    exchange = ExchangeLoop(
        Calls(parts["transport"], Retry(RetrySettings(), random.Random(0), is_transient)),
        parts["parameters"],
        ExchangeSettings(run="fit", learner_id="us", create=True, policy=QUICK),
        workers=parts["workers"],
        entropy=SystemEntropy(),
        boundary=Boundary(SystemClock(), asyncio.get_running_loop().call_soon_threadsafe),
    )

    async def train_until(is_over: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not is_over():
                exchange.step(8, await asyncio.to_thread(problem.descend))

    def fail(*_: Any, **__: Any) -> Any:
        raise error

    await exchange.join()
    running = asyncio.ensure_future(exchange.run())
    await exchange.wait_attached()
    await train_until(lambda: exchange.stats.deltas_merged >= 2)
    part, method = place.split(".")
    monkeypatch.setattr(parts[part], method, fail)
    await train_until(lambda: exchange.stats.failure is not None)
    assert getattr(exchange.stats.failure, "reason", "") == "DEFECT"
    assert not exchange.stats.is_attached
    exchange.step(8)  # training goes on
    await exchange.leave()
    await running
    await parts["transport"].close()
