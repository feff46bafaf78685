"""The exchange itself, on the test's own event loop, over a link that fails as each test says."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import grpc
import numpy as np
import pytest
from grpc.aio import Metadata

from skerry import MergeRule, OuterOptimizer, OuterSchedule, errors
from skerry.errors import error_of
from skerry.exchange.loop import ExchangeLoop
from skerry.exchange.settings import ExchangeSettings
from skerry.model.interface import ArrayParameters
from skerry.net.grpc_transport import GrpcTransport
from skerry.net.replicas import CONTROL
from skerry.net.retry import RetrySettings
from skerry.runtime.clock import SystemClock
from skerry.runtime.identifiers import SystemEntropy
from skerry.runtime.workers import InlineWorkers
from skerry.v1 import exchange_pb2 as v1
from skerry.v1 import runs_pb2, types_pb2
from skerry.wire import Codec, Encoding
from tests.support.faulty_transport import Faults, FaultyTransport
from tests.support.http_proxy import HttpProxy
from tests.support.quadratic import QUICK, Quadratic

SETTINGS = ExchangeSettings(
    run="fit",
    learner_id="a",
    may_create=True,
    policy=QUICK,
    retry=RetrySettings(first_wait_s=0.01, longest_wait_s=0.05),
)


class World:
    """One learner on a bad link, trained by the test."""

    def __init__(self, target: str, faults: Faults, settings: ExchangeSettings) -> None:
        self.problem = Quadratic()
        self.transport = FaultyTransport(target, faults)
        self.parameters = ArrayParameters(self.problem.arrays)
        self.workers = InlineWorkers()
        self.exchange = ExchangeLoop(
            self.transport,
            self.parameters,
            settings,
            workers=self.workers,
            entropy=SystemEntropy(),
            jitter=random.Random(0),
            clock=SystemClock(),
        )

    async def train_until(self, is_over: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not is_over():
                loss = await asyncio.to_thread(self.problem.descend)
                self.exchange.step(8, loss)

    async def merged_delta_ids(self) -> list[str]:
        """Closes the run and returns every delta that the log has merged: as many as were acknowledged."""
        close = runs_pb2.CloseRunRequest(name="fit")
        run = (await self.transport.ask(lambda at: at.runs.CloseRun(close, timeout=20))).run
        merged = []
        for fragment in run.fragments:
            page = runs_pb2.ListVersionsRequest(name="fit", fragment=fragment.name, page_size=1000)
            merged += await self._merged_into(page)
        # An answer may still be on its way; no delta may be counted that the log has not.
        await self.train_until(lambda: self.exchange.view.stats.deltas_acknowledged >= len(merged))
        assert self.exchange.view.stats.deltas_acknowledged == len(merged)
        return merged

    async def _merged_into(self, page: runs_pb2.ListVersionsRequest) -> list[str]:
        response = await self.transport.ask(lambda at: at.runs.ListVersions(page, timeout=20))
        return [fate.delta_id for record in response.versions for fate in record.merged]


@asynccontextmanager
async def training(target: str, faults: Faults, settings: ExchangeSettings = SETTINGS) -> AsyncIterator[World]:
    world = World(target, faults, settings)
    await world.exchange.join()
    running = asyncio.ensure_future(world.exchange.run())
    try:
        await world.exchange.wait_attached()
        yield world
    finally:
        await world.exchange.leave()
        await running
        await world.transport.close()


async def test_a_lost_acknowledgement_is_asked_for_and_counted_once(target: str) -> None:
    faults = Faults()
    async with training(target, faults) as world:
        faults.lost_acknowledgements = 5
        await world.train_until(lambda: world.exchange.view.stats.deltas_merged >= 12)
        assert faults.log == ["acknowledgement lost"] * 5
        merged = await world.merged_delta_ids()
        assert len(merged) == len(set(merged))


@pytest.mark.parametrize("code", [grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.PERMISSION_DENIED])
@pytest.mark.parametrize("is_delivered", [True, False])
async def test_a_status_of_a_proxy_says_nothing_about_a_push(
    target: str, code: grpc.StatusCode, monkeypatch: pytest.MonkeyPatch, *, is_delivered: bool
) -> None:
    answered = {"PushDelta": 0, "QueryPush": 0}  # calls that a proxy has answered

    def put_proxy_before(stub: Any, method: str) -> None:
        call = getattr(stub, method)

        async def proxied(*arguments: Any, **options: Any) -> Any:
            if answered[method] == 3:
                return await call(*arguments, **options)
            answered[method] += 1
            if is_delivered:
                await call(*arguments, **options)
            raise grpc.aio.AioRpcError(code, Metadata(), Metadata(), "a proxy's page", "")

        monkeypatch.setattr(stub, method, proxied)

    async with training(target, Faults()) as world:
        (replica,) = world.transport._replicas
        put_proxy_before(replica.connection(0).exchange, "PushDelta")
        put_proxy_before(replica.connection(CONTROL).exchange, "QueryPush")
        await world.train_until(lambda: world.exchange.view.stats.deltas_merged >= 12)
        assert answered["PushDelta"] == 3
        assert is_delivered or answered["QueryPush"] == 3
        assert world.exchange.view.stats.deltas_returned == 0
        merged = await world.merged_delta_ids()
        assert len(merged) == len(set(merged))


@pytest.mark.parametrize("status", [400, 401, 403, 404, 429, 502, 503])
async def test_a_page_of_a_proxy_returns_no_work(target: str, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    proxy, direct = HttpProxy(target), GrpcTransport(target)
    async with proxy.listening(), training(f"127.0.0.1:{proxy.port}", Faults()) as world:
        await world.train_until(lambda: world.exchange.view.stats.deltas_acknowledged >= 3)
        push = world.transport.push_delta

        async def unanswered(requests: Any) -> Any:
            monkeypatch.setattr(world.transport, "push_delta", push)
            proxy.answer(status)  # before the effect, so that no event acknowledges the delta
            await direct.push_delta(requests)
            raise error_of("UNREACHABLE", "answer was lost")

        monkeypatch.setattr(world.transport, "push_delta", unanswered)
        await world.train_until(lambda: proxy.answered_count >= 5)
        proxy.answer(None)
        await world.train_until(lambda: world.exchange.view.stats.deltas_merged >= 12)
        assert world.exchange.view.stats.deltas_returned == 0
        assert await world.merged_delta_ids()
    await direct.close()


async def test_a_learner_whose_run_was_closed_knows_its_last_fates_though_no_event_told_them(target: str) -> None:
    async with training(target, Faults(attach_cuts=[0] * 10_000)) as world:
        await world.train_until(lambda: world.exchange.view.stats.deltas_acknowledged >= 3)
        await world.transport.ask(lambda at: at.runs.CloseRun(runs_pb2.CloseRunRequest(name="fit"), timeout=20))
        await world.train_until(lambda: world.exchange.view.is_closed and world.exchange.is_flushed)
        await world.train_until(lambda: not world.exchange.view.stats.is_attached)
        assert world.exchange.view.failure is None
        stats = world.exchange.view.stats
        assert stats.deltas_merged + stats.deltas_returned == stats.deltas_acknowledged


@pytest.mark.parametrize(
    ("lane_bytes", "cuts"), [(SETTINGS.lane_bytes, [1, 3, 4, 8, 11, 2]), (600, [1, 3, 2, 3, 1, 2])]
)
async def test_a_push_that_was_cut_sends_the_same_delta_from_its_last_whole_part(
    target: str, lane_bytes: int, cuts: list[int]
) -> None:
    faults = Faults()
    async with training(target, faults, replace(SETTINGS, lane_bytes=lane_bytes)) as world:
        # Small parts, so that some are durable when the push breaks: header, then begin, data and end of each part.
        world.exchange._session.part_size_bytes = 512
        faults.push_cuts = cuts
        await world.train_until(lambda: world.exchange.view.stats.deltas_merged >= 12)
        assert faults.log.count("push cut") == 6
        merged = await world.merged_delta_ids()
        assert len(merged) == len(set(merged))
        assert set(merged) <= set(world.transport.delta_ids)
        # A delta that was cut keeps its id, for its bytes stay the same.
        assert len(world.transport.delta_ids) > len(set(world.transport.delta_ids))


@pytest.mark.parametrize(
    ("lane_bytes", "calm"),  # calls between two that break: one that breaks gives up those beside it
    [(SETTINGS.lane_bytes, 0), (100, 5)],
)
async def test_a_download_that_was_cut_goes_on_where_it_broke(target: str, lane_bytes: int, calm: int) -> None:
    faults = Faults()
    async with training(target, faults, replace(SETTINGS, lane_bytes=lane_bytes)) as world:
        faults.pull_cuts = [messages for cut in (0, 1, 1, 2, 0, 1) * 2 for messages in (cut, *[99] * calm)]
        await world.train_until(lambda: min(world.exchange.view.stats.versions.values()) >= 5)
        assert faults.log.count("pull cut") >= 4
        assert world.exchange.view.failure is None


async def test_a_download_whose_calls_are_too_many_for_the_link_takes_fewer(target: str) -> None:
    faults = Faults()
    async with training(target, faults, replace(SETTINGS, lane_bytes=100, concurrent_transfers=1)) as world:
        faults.most_pulls = 1
        await world.train_until(lambda: min(world.exchange.view.stats.versions.values()) >= 3)
        assert "pull stalled" in faults.log
        assert world.exchange.view.failure is None


async def test_a_corrupt_download_is_noticed_and_a_snapshot_taken(target: str) -> None:
    faults = Faults()
    async with training(target, faults) as world:
        faults.corrupt_pulls = 3
        await world.train_until(lambda: not faults.corrupt_pulls)
        before = world.exchange.view.stats.versions
        await world.train_until(lambda: min(world.exchange.view.stats.versions.values()) > max(before.values()))
        assert faults.log == ["pull corrupted"] * 3
        assert world.problem.loss < Quadratic().loss


async def test_a_learner_whose_store_lost_what_it_saw_asks_again_later_and_goes_on(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It trains on alone meanwhile, and keeps the delta that it was sending."""
    monkeypatch.setattr(errors, "_LOST_STORE_WAIT_S", 0.2)
    faults = Faults(attach_cuts=[2])
    async with training(target, faults) as world:
        await world.train_until(lambda: world.exchange.view.stats.deltas_merged >= 3)
        faults.lost_store_calls = 12
        await world.train_until(lambda: faults.lost_store_calls == 0)
        before = world.exchange.view.stats.deltas_merged
        await world.train_until(lambda: world.exchange.view.stats.deltas_merged >= before + 6)
        assert world.exchange.view.failure is None
        merged = await world.merged_delta_ids()
        assert len(set(merged)) == len(merged)


@pytest.mark.parametrize("codec", [Codec.FLOAT32, Codec.INT4])
async def test_with_plain_averaging_a_lone_learner_trains_as_if_it_were_alone(target: str, codec: Codec) -> None:
    """Each version is then the last minus the learner's own delta, so what rebase adds must come to nothing."""
    outer = OuterOptimizer(learning_rate=1.0, momentum=0.0, schedule=OuterSchedule.CONSTANT)
    encoding = Encoding(codec, vector_codec=Codec.FLOAT32)
    exact = Encoding(Codec.FLOAT32)
    policy = replace(QUICK, outer=outer, merge=MergeRule.MEAN, delta_encoding=encoding, update_encoding=exact)
    async with training(target, Faults(), replace(SETTINGS, policy=policy)) as world:
        await world.train_until(lambda: min(world.exchange.view.stats.versions.values()) >= 6)
        alone = Quadratic()
        for _ in range(world.exchange.view.stats.step_count):
            alone.descend()
        for name, array in world.problem.arrays.items():
            np.testing.assert_allclose(array, alone.arrays[name], atol=1e-5)


async def test_a_stalled_push_is_given_up_and_sent_again(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = replace(SETTINGS, stall_timeout_s=0.2)
    async with training(target, Faults(), settings) as world:
        push = world.transport.push_delta
        stalls = iter([True, True, False])

        async def stalling(requests: AsyncIterator[object]) -> object:
            if next(stalls, False):
                await asyncio.Event().wait()
            return await push(requests)  # type: ignore[arg-type]  # handed on as it came

        monkeypatch.setattr(world.transport, "push_delta", stalling)
        await world.train_until(lambda: world.exchange.view.stats.deltas_merged >= 3)
        assert world.exchange.view.failure is None


async def test_a_lone_learner_whose_delta_was_quarantined_goes_on_from_the_run_s_weights(target: str) -> None:
    settings = replace(SETTINGS, policy=replace(QUICK, quarantine_ratio=30.0))
    async with training(target, Faults(), settings) as world:
        await world.train_until(lambda: world.exchange.view.stats.deltas_merged >= 12)
        for size in 10.0 ** np.arange(6):  # as a rate that is much too large lets weights grow, from step to step
            for array in world.problem.arrays.values():
                array[...] += np.float32(size)
            world.exchange.step(8)
        await world.train_until(
            lambda: world.exchange.view.stats.deltas_dropped >= len(world.exchange.view.stats.versions)
        )
        before = world.exchange.view.stats.versions
        await world.train_until(
            lambda: all(version > before[name] for name, version in world.exchange.view.stats.versions.items())
        )


class Odd(FaultyTransport):
    """Says once what no syncer of this version says: an event before or after the answer to the first attach."""

    def __init__(self, target: str, event: types_pb2.Event | None, *, is_first: bool) -> None:
        super().__init__(target, Faults())
        self.odd = None if event is None else v1.AttachResponse(event=event)
        self.is_first = is_first

    async def attach(self, requests: AsyncIterator[v1.AttachRequest]) -> AsyncGenerator[v1.AttachResponse, None]:
        odd, self.odd = self.odd, None
        if odd is not None and self.is_first:
            yield odd
        async for response in super().attach(requests):
            if odd is None and response.HasField("attached"):
                response.attached.lease_term.seconds = -(2**62)
            yield response
            if odd is not None and not self.is_first:
                yield odd


@pytest.mark.parametrize(
    ("event", "is_first"),
    [
        (types_pb2.Event(policy_changed=types_pb2.Policy(quorum_count=-1)), False),
        (types_pb2.Event(round_opened=types_pb2.RoundOpened(fragment="fragment-00", version=2)), True),
        (None, False),
    ],
    ids=["policy out of range", "event before the answer", "lease below 0"],
)
async def test_a_learner_exchanges_on_whatever_its_syncer_said(
    target: str, event: types_pb2.Event | None, is_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "tests.integration.client.test_exchange.FaultyTransport",
        lambda target, _: Odd(target, event, is_first=is_first),
    )
    async with training(target, Faults()) as world:
        await world.train_until(lambda: world.exchange.view.stats.deltas_acknowledged >= 6)
        assert world.exchange.view.failure is None


@pytest.mark.parametrize("error", [TypeError("a defect"), asyncio.CancelledError()], ids=["error", "cancelled"])
@pytest.mark.parametrize(
    ("part", "method"),
    [
        ("transport", "attach"),
        ("transport", "push_delta"),
        ("transport", "pull_fragment"),
        ("workers", "run"),
        ("parameters", "buffer"),
        ("parameters", "snapshot"),
        ("parameters", "encode"),
        ("parameters", "add"),
        ("parameters", "from_host"),
    ],
)
async def test_no_defect_ends_the_exchange_silently(
    target: str, part: str, method: str, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    async with training(target, Faults(attach_cuts=[0] * 1000 if method == "attach" else [])) as world:
        await world.train_until(lambda: world.exchange.view.stats.deltas_merged >= 2)
        monkeypatch.setattr(getattr(world, part), method, fail)
        await world.train_until(lambda: world.exchange.view.failure is not None)
        failure = world.exchange.view.failure
        assert failure is not None
        assert failure.reason == "DEFECT"
        assert "a defect" in str(failure) or "as if it had been cancelled" in str(failure)
        assert world.exchange.view.stats.problem is failure
        assert not world.exchange.view.stats.is_attached
        world.exchange.step(8)  # training goes on


@pytest.mark.parametrize(("error", "reason"), [(TypeError("no"), "DEFECT"), (KeyboardInterrupt("no"), "INTERRUPTED")])
@pytest.mark.parametrize("method", ["snapshot", "add"])
async def test_what_fails_on_the_training_thread_is_said_too(
    target: str, method: str, error: BaseException, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise error

    async with training(target, Faults()) as world:
        await world.train_until(lambda: world.exchange.view.stats.deltas_merged >= 2)
        monkeypatch.setattr(world.parameters, method, lambda *_: fail)
        while world.exchange.view.failure is None:
            with suppress(KeyboardInterrupt):  # as a notebook's user does, who goes on with the next cell
                await world.train_until(lambda: world.exchange.view.failure is not None)
        assert world.exchange.view.failure.reason == reason
        assert world.exchange.view.stats.problem is world.exchange.view.failure
