"""What a syncer keeps of a run: what nobody needs goes by itself, and what is pinned stays."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial

import grpc
import numpy as np

from skerry.v1 import exchange_pb2 as exchange
from skerry.v1 import runs_pb2 as runs
from skerry.v1 import types_pb2 as types
from skerry_syncer.run.host import HostSettings
from skerry_syncer.server import serving
from skerry_syncer.settings import ReplicaSettings
from skerry_syncer.store.objects.opening import open_objects
from tests.integration.syncer.conftest import LOCAL
from tests.support.hooked_objects import HookedObjects
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
    quick,
    refused,
)

_LITTLE = quick(kept_version_count=1, kept_hours=0, kept_day_count=0, snapshot_ratio=0.3)
_OFTEN = ReplicaSettings(collection_look_s=0.05, checkpoint_every=16)


async def _pin(stubs: Stubs, position: int) -> list[int]:
    """Pins a position, or takes the pin of its negative away; returns those that are pinned."""
    policy = types.Policy(pinned_positions=[position])
    request = runs.SetPolicyRequest(request_id=f"{abs(position):016x}{position < 0:016x}", name="demo", policy=policy)
    return list((await stubs.runs.SetPolicy(request)).run.policy.pinned_positions)


async def test_what_is_not_kept_goes_by_itself_and_a_pin_stays(store_url: str) -> None:
    settings = replace(LOCAL, host=replace(LOCAL.host, replica=_OFTEN))
    objects = open_objects(store_url)
    async with serving(objects, settings) as server, connected(server.port) as stubs:
        run, _ = await create_run(stubs, policy=_LITTLE)
        learner = await attached(stubs, run)
        events = [await learner.advance(seed) for seed in range(4)]
        wanted = await pull(stubs, run, "body")
        position = events[-1].position
        assert await _pin(stubs, position) == [position]
        for seed in range(12):
            await learner.advance(seed)
        folder = f"runs/demo/{run.uid}/deltas/body"
        while len([info async for info in objects.list(folder)]) > 10:  # of 16 and the initial weights
            await asyncio.sleep(0.02)
        with refused("VERSION_NOT_FOUND", grpc.StatusCode.NOT_FOUND):
            await _pin(stubs, events[0].position)
        request = runs.RollBackRequest(request_id="c" * 32, name="demo", target_position=position)
        rolled = (await stubs.runs.RollBack(request)).run
        assert [(version.fragment, version.version) for version in rolled.versions] == [("body", 17), ("head", 1)]
        assert np.array_equal((await pull(stubs, run, "body")).values, wanted.values)
        assert await _pin(stubs, -position) == []


class DatedObjects(HookedObjects):
    """A store whose clock a test sets, and begins in 1970. It counts how often it was asked for the time."""

    def __init__(self) -> None:
        super().__init__()
        self.look = ("before create", "clock-")
        self.hooks[self.look] = partial(asyncio.sleep, 0)

    async def until(self, *, is_there: bool, words: list[str]) -> None:
        """Returns once each word is in an object's name, or none is."""
        async with asyncio.timeout(20):
            while any(any(word in name for name in self.objects) is not is_there for word in words):
                await asyncio.sleep(0.01)

    async def looked_at(self) -> None:
        """Returns once the syncer has looked for old objects."""
        before = self.calls[self.look]
        async with asyncio.timeout(20):
            while self.calls[self.look] < before + 2:
                await asyncio.sleep(0.01)


async def abandon_part(learner: RawLearner) -> str:
    """Pushes one of two parts, and no more; returns the delta's id."""
    header = learner.header(await pull(learner.stubs, learner.run, "body"), "body")
    messages = push_messages(header, delta_values(), FLOAT32, parts=((0, 1200), (1200, 40)))
    ends = [number for number, message in enumerate(messages) if message.HasField("part_end")]
    answer = await learner.stubs.exchange.PushDelta(iter(messages[: ends[0] + 1]))
    assert answer.state == exchange.PUSH_STATE_PARTS_STORED
    return header.delta_id


async def test_what_is_abandoned_expires_by_the_stores_clock_whatever_the_syncers_says() -> None:
    objects = DatedObjects()
    settings = replace(LOCAL, host=HostSettings(tidy_s=0.05))
    async with serving(objects, settings) as server, connected(server.port) as stubs:
        run, _ = await create_run(stubs)
        learner = await attached(stubs, run)
        old = [(await create_draft(stubs, "lost", seed=1))[0].uid, await abandon_part(learner), "/learners/gone/"]
        await (await attached(stubs, run, "gone")).leave()
        await objects.until(is_there=True, words=old)
        objects.now_s += 80_000
        young = [(await create_draft(stubs, "lost", seed=2))[0].uid, await abandon_part(learner)]
        await objects.looked_at()
        await objects.until(is_there=True, words=old)
        objects.now_s += 10_000
        await objects.until(is_there=False, words=old)
        await objects.looked_at()
        await objects.until(is_there=True, words=young)
        assert (await pull(stubs, run, "body")).version == 0
