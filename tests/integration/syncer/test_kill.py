"""Real processes and real signals: a syncer is killed at any instant, or drained."""

from __future__ import annotations

import asyncio
import contextlib
import random
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from skerry.v1 import exchange_pb2 as exchange
from skerry.v1 import runs_pb2 as runs
from skerry_syncer.store.log.entries import Fate
from tests.support.audit import check_fates, final_state
from tests.support.persistent_learner import PAUSE_S, PersistentLearner, until_more
from tests.support.raw_learner import INT4, Stubs, attached, connected, create_run, delta_values, pull, push_messages
from tests.support.serve_process import serve_process


@pytest.mark.parametrize("seed", [1, 2])
async def test_a_syncer_killed_at_any_instant_loses_nothing_and_merges_nothing_twice(
    seed: int, store_url: str, tmp_path: Path
) -> None:
    source = random.Random(seed)
    stop = asyncio.Event()
    async with serve_process(store_url, tmp_path) as process, connected(process.port) as stubs:
        run, _ = await create_run(stubs)
        persistent = []
        for name, fragment in (("eu", "body"), ("us", "body"), ("ap", "head")):
            learner = await attached(stubs, run, name)
            learner.detach()
            persistent.append(PersistentLearner(learner, fragment))
        async with asyncio.TaskGroup() as tasks:
            for one in persistent:
                tasks.create_task(one.train(stop))
            for _ in range(6):
                await asyncio.sleep(source.uniform(0.05, 0.7))
                await process.kill()
                await process.start()
            before = sum(len(one.acknowledged) for one in persistent)
            await until_more(persistent, before + 3)
            stop.set()
        await stubs.runs.CloseRun(runs.CloseRunRequest(name="demo"), wait_for_ready=True)
    state = await final_state(store_url, "demo", run.uid)
    acknowledged = set().union(*(one.acknowledged for one in persistent))
    counts = check_fates(state, acknowledged)
    assert counts[Fate.MERGED] > len(acknowledged) // 2
    assert counts[Fate.QUARANTINED] == 0


async def _is_back(stubs: Stubs) -> None:
    await stubs.runs.GetRun(runs.GetRunRequest(name="demo"), wait_for_ready=True)


async def test_a_push_cut_off_by_a_kill_goes_on_from_its_last_whole_part(store_url: str, tmp_path: Path) -> None:
    async with serve_process(store_url, tmp_path) as process, connected(process.port) as stubs:
        run, _ = await create_run(stubs)
        learner = await attached(stubs, run)
        header = learner.header(await pull(stubs, run, "body"), "body")
        begin, *messages, complete = push_messages(header, delta_values(), INT4, parts=((0, 512), (512, 728)))
        ends = [number for number, message in enumerate(messages) if message.HasField("part_end")]
        call = stubs.exchange.PushDelta(None)
        for message in (begin, *messages[: ends[1]]):
            await call.write(message)
        async with asyncio.timeout(20):
            while not (await learner.query(header)).parts:
                await asyncio.sleep(PAUSE_S)
        await process.kill()
        await process.start()
        with contextlib.suppress(grpc.aio.AioRpcError):
            await call
        await _is_back(stubs)
        (part,) = (await learner.query(header)).parts
        assert (part.first, part.numel, part.digest) == (0, 512, messages[ends[0]].part_end.digest)
        rest = [begin, *messages[ends[0] + 1 :], complete]
        assert (await stubs.exchange.PushDelta(iter(rest))).state == exchange.PUSH_STATE_ACCEPTED


async def test_sigterm_drains(store_url: str, tmp_path: Path) -> None:
    async with serve_process(store_url, tmp_path) as process, connected(process.port) as stubs:
        run, _ = await create_run(stubs)
        learner = await attached(stubs, run)
        header = learner.header(await pull(stubs, run, "body"), "body")
        messages = push_messages(header, delta_values(), INT4)
        call = stubs.exchange.PushDelta(None)
        for message in messages[:3]:
            await call.write(message)
        health = health_pb2_grpc.HealthStub(stubs.channel).Watch(health_pb2.HealthCheckRequest())
        assert (await health.read()).status == health_pb2.HealthCheckResponse.SERVING
        process.terminate()
        assert (await health.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert (await learner.event("draining")).draining.grace.seconds == 10
        # A push in flight ends normally.
        for message in messages[3:]:
            await call.write(message)
        await call.done_writing()
        assert (await call).state == exchange.PUSH_STATE_ACCEPTED
        health.cancel()
        assert await process.exit_status() == 0
        await process.start()
        await _is_back(stubs)
        assert (await learner.query(header)).state == exchange.PUSH_STATE_ACCEPTED
