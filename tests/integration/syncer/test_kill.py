"""Real processes and real signals: a syncer is killed at any instant, or drained."""

from __future__ import annotations

import asyncio
import contextlib
import random
from pathlib import Path

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from skerry.v1 import exchange_pb2 as exchange
from skerry.v1 import runs_pb2 as runs
from skerry.v1 import types_pb2 as types
from skerry_syncer.store.log.entries import Fate
from tests.support.audit import check_fates, final_state
from tests.support.persistent_learner import PAUSE_S, PersistentLearner, until_more
from tests.support.raw_learner import (
    INT4,
    RawLearner,
    Stubs,
    connected,
    create_run,
    layout,
    part_messages,
    pull,
    push_messages,
)
from tests.support.serve_process import ServeProcess, serve_process


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
            learner = RawLearner(stubs, run, name, source)
            await learner.attach()
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


async def _killed_and_restarted(process: ServeProcess) -> None:
    await process.kill()
    await process.start()


async def test_a_push_cut_off_by_a_kill_goes_on_from_its_last_whole_part(store_url: str, tmp_path: Path) -> None:
    async with serve_process(store_url, tmp_path) as process, connected(process.port) as stubs:
        run, _ = await create_run(stubs)
        learner = RawLearner(stubs, run, "eu", random.Random(3))
        await learner.attach()
        header = learner.header(await pull(stubs, run, "body"), "body")
        values = np.random.default_rng(3).standard_normal(layout("body").numel).astype(np.float32)
        parts = ((0, 512), (512, 728))
        first, digest = part_messages(values, layout("body"), INT4, *parts[0])
        second, _ = part_messages(values, layout("body"), INT4, *parts[1])
        call = stubs.exchange.PushDelta(None)
        for message in (exchange.PushDeltaRequest(header=header), *first, *second[:-1]):
            await call.write(message)
        await _until_stored(learner, header, 1)
        await _killed_and_restarted(process)
        with contextlib.suppress(grpc.aio.AioRpcError):
            await call
        found = await _patiently(learner, header)
        assert [(part.first, part.numel, part.digest) for part in found.parts] == [(0, 512, digest)]
        complete = push_messages(header, values, INT4, parts=parts)[-1]
        answer = await stubs.exchange.PushDelta(
            iter([exchange.PushDeltaRequest(header=header), *second, complete]), wait_for_ready=True
        )
        assert answer.state == exchange.PUSH_STATE_ACCEPTED


async def _until_stored(learner: RawLearner, header: exchange.PushHeader, count: int) -> None:
    async with asyncio.timeout(20):
        while len((await learner.query(header)).parts) < count:
            await asyncio.sleep(PAUSE_S)


async def _patiently(learner: RawLearner, header: exchange.PushHeader) -> exchange.QueryPushResponse:
    return await learner.stubs.exchange.QueryPush(
        exchange.QueryPushRequest(
            run=header.run, run_uid=header.run_uid, fragment=header.fragment, delta_id=header.delta_id
        ),
        wait_for_ready=True,
    )


async def test_sigterm_drains(store_url: str, tmp_path: Path) -> None:
    async with serve_process(store_url, tmp_path) as process, connected(process.port) as stubs:
        run, _ = await create_run(stubs)
        learner, header, messages = await _half_pushed(stubs, run)
        call = stubs.exchange.PushDelta(None)
        for message in messages[:3]:
            await call.write(message)
        health = health_pb2_grpc.HealthStub(stubs.channel).Watch(health_pb2.HealthCheckRequest())
        assert (await health.read()).status == health_pb2.HealthCheckResponse.SERVING
        process.terminate()
        assert (await health.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        draining = (await learner.event("draining")).draining
        assert draining.grace.seconds == 10
        # A push in flight ends normally.
        for message in messages[3:]:
            await call.write(message)
        await call.done_writing()
        answer = await call
        assert answer.state == exchange.PUSH_STATE_ACCEPTED
        health.cancel()
        assert await process.exit_status() == 0
        await process.start()
        found = await _patiently(learner, header)
        assert found.state == exchange.PUSH_STATE_ACCEPTED


async def _half_pushed(
    stubs: Stubs, run: types.Run
) -> tuple[RawLearner, exchange.PushHeader, list[exchange.PushDeltaRequest]]:
    learner = RawLearner(stubs, run, "eu", random.Random(4))
    await learner.attach()
    header = learner.header(await pull(stubs, run, "body"), "body")
    values = np.random.default_rng(4).standard_normal(layout("body").numel).astype(np.float32)
    return learner, header, push_messages(header, values, INT4)
