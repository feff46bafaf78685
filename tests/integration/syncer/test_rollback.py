"""A roll-back of a run that takes the store long is answered in time, can be ended elsewhere, and takes effect once."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from skerry.v1 import runs_pb2 as runs
from skerry.v1 import types_pb2 as types
from skerry_syncer.server import serving
from tests.integration.syncer.conftest import LOCAL
from tests.support.hooked_objects import HookedObjects
from tests.support.raw_learner import Stubs, attached, connected, create_run, pull

STORING = ("before write", "snapshots/head/")


@pytest.fixture
def objects() -> HookedObjects:
    return HookedObjects()


async def _trained(stubs: Stubs) -> types.Run:
    """Returns a run with a version 1 of its fragment `body`."""
    run, _ = await create_run(stubs)
    await (await attached(stubs, run)).advance()
    return run


async def _rolled_back(stubs: Stubs, run: types.Run, *, request_id: str = "1" * 32) -> runs.RollBackResponse:
    request = runs.RollBackRequest(request_id=request_id, name="demo", target_position=run.position)
    return await stubs.runs.RollBack(request, timeout=5)


def _versions(run: types.Run) -> list[int]:
    return [version.version for version in run.versions]


async def test_a_roll_back_answers_in_time_and_goes_on_while_nobody_asks(objects: HookedObjects) -> None:
    async with serving(objects, LOCAL) as server, connected(server.port) as stubs:
        run = await _trained(stubs)
        objects.hooks[STORING] = (go := asyncio.Event()).wait
        answer = await _rolled_back(stubs, run)
        assert (answer.progress.stored_count, answer.progress.fragment_count) == (1, 2)
        assert _versions(answer.run) == [1, 0], "nothing is rolled back yet"
        go.set()
        for _ in range(2):
            answer = await _rolled_back(stubs, run)
            assert (_versions(answer.run), answer.HasField("progress")) == ([2, 1], False)
        assert objects.calls[STORING] == 1, "the second call waited for what the first had begun"


async def test_another_replica_ends_what_a_killed_one_began(objects: HookedObjects) -> None:
    async with serving(objects, LOCAL) as server, connected(server.port) as stubs:
        run = await _trained(stubs)
        objects.hooks[STORING] = asyncio.Event().wait
        assert (await _rolled_back(stubs, run)).progress.stored_count == 1
    objects.hooks.clear()
    async with (
        serving(objects, LOCAL) as first,
        serving(objects, LOCAL) as second,
        connected(first.port) as stubs,
        connected(second.port) as others,
    ):
        await asyncio.gather(_rolled_back(stubs, run), _rolled_back(others, run))
        request = runs.GetRunRequest(name="demo", seen_position=run.position)
        assert _versions((await others.runs.GetRun(request)).run) == [2, 1]
        oldest, newest = [await pull(stubs, run, "body", target=target) for target in (0, 2)]
        assert np.array_equal(newest.values, oldest.values)


async def test_a_roll_back_that_nobody_asks_for_any_more_has_no_effect(objects: HookedObjects) -> None:
    async with serving(objects, LOCAL) as server, connected(server.port) as stubs:
        run = await _trained(stubs)
        objects.hooks[STORING] = (go := asyncio.Event()).wait
        assert (await _rolled_back(stubs, run)).HasField("progress")
        go.set()
        async with asyncio.timeout(5):
            while not any("/snapshots/head/1-" in name for name in objects.objects):
                await asyncio.sleep(0.02)
        assert _versions((await stubs.runs.GetRun(runs.GetRunRequest(name="demo"))).run) == [1, 0]
        assert _versions((await _rolled_back(stubs, run, request_id="2" * 32)).run) == [2, 1]
