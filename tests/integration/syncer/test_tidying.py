"""Abandoned drafts, parts of deltas that never completed and old leases expire by themselves, and nothing else."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from skerry.v1 import exchange_pb2 as exchange
from skerry_syncer.run.host import HostSettings
from skerry_syncer.server import serving
from skerry_syncer.store.objects.opening import open_objects
from tests.integration.syncer.conftest import LOCAL
from tests.support.dict_objects import DictObjects
from tests.support.heard_logs import heard_logs
from tests.support.raw_learner import (
    FLOAT32,
    RawLearner,
    Stubs,
    attached,
    connected,
    create_draft,
    create_run,
    delta_values,
    pull,
    push_messages,
)

TWO_DAYS_S = 2 * 86_400


async def abandon_part(stubs: Stubs, learner: RawLearner) -> str:
    """Pushes one of two parts, and no more; returns the delta's id."""
    header = learner.header(await pull(stubs, learner.run, "body"), "body")
    messages = push_messages(header, delta_values(), FLOAT32, parts=((0, 1200), (1200, 40)))
    ends = [number for number, message in enumerate(messages) if message.HasField("part_end")]
    answer = await stubs.exchange.PushDelta(iter(messages[: ends[0] + 1]))
    assert answer.state == exchange.PUSH_STATE_PARTS_STORED
    return header.delta_id


def files(folder: Path, text: str) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and text in str(path)]


async def test_abandoned_drafts_and_orphaned_parts_expire(tmp_path: Path) -> None:
    store = tmp_path / "store"
    settings = replace(LOCAL, host=HostSettings(tidy_s=0.3, idle_s=0.1, sweep_s=0.1))
    async with serving(open_objects(store.as_uri()), LOCAL) as server, connected(server.port) as stubs:
        run, _ = await create_run(stubs)
        old_draft = (await create_draft(stubs, "lost", seed=1))[0].uid
        learner = await attached(stubs, run)
        old_delta = await abandon_part(stubs, learner)
        before = await pull(stubs, run, "body")
        await attached(stubs, run, "gone")
        async with asyncio.timeout(20):
            while not files(store, "/learners/gone/"):
                await asyncio.sleep(0.1)
    for path in files(store, "runs"):
        os.utime(path, (time.time() - TWO_DAYS_S,) * 2)
    with heard_logs() as lines:
        async with serving(open_objects(store.as_uri()), settings) as server, connected(server.port) as stubs:
            young_draft = (await create_draft(stubs, "lost", seed=3))[0].uid
            learner.stubs = stubs
            await learner.attach()
            young_delta = await abandon_part(stubs, learner)
            async with asyncio.timeout(20):
                while files(store, old_draft) or files(store, old_delta) or files(store, "/learners/gone/"):
                    await asyncio.sleep(0.1)
                while not {"draft expired", "collected"} <= {line["event"] for line in lines}:
                    await asyncio.sleep(0.1)
            assert files(store, young_draft)
            assert files(store, young_delta)
            after = await pull(stubs, run, "body")
            assert np.array_equal(before.values, after.values)


class DatedObjects(DictObjects):
    """A store whose clock a test sets, and begins in 1970. It counts how often it was asked for the time."""

    def __init__(self) -> None:
        super().__init__(unix=lambda: self.now_s)
        self.now_s = 0.0
        self.look_count = 0

    async def create(self, name: str, data: bytes) -> None:
        self.look_count += "clock-" in name
        await super().create(name, data)


async def test_an_object_is_as_old_as_the_store_says_whatever_the_syncers_clock_says() -> None:
    objects = DatedObjects()
    settings = replace(LOCAL, host=HostSettings(tidy_s=0.05))

    async def left() -> int:
        """Returns how many of the abandoned objects there are after the syncer has looked for them."""
        before = objects.look_count
        async with asyncio.timeout(20):
            while objects.look_count < before + 2:
                await asyncio.sleep(0.01)
        return sum(draft in name or delta in name for name in objects.objects)

    async with serving(objects, settings) as server, connected(server.port) as stubs:
        run, _ = await create_run(stubs)
        draft = (await create_draft(stubs, "lost", seed=1))[0].uid
        learner = await attached(stubs, run)
        delta = await abandon_part(stubs, learner)
        count = await left()
        objects.now_s += 80_000
        assert await left() == count > 1
        objects.now_s += 10_000
        assert await left() == 0
