"""Drafts: a run has no name until its creator has committed it with all initial weights."""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack
from dataclasses import replace

import grpc
import numpy as np
import zstandard
from blake3 import blake3

from skerry import ArrayLearner
from skerry.v1 import exchange_pb2 as exchange
from skerry.v1 import runs_pb2 as runs
from skerry.v1 import types_pb2 as types
from skerry.wire.codecs import Compressor
from skerry_syncer.run.host import HostSettings
from skerry_syncer.server import serving
from skerry_syncer.store.log.entries import INITIAL_BASE
from skerry_syncer.store.objects.opening import open_objects
from tests.integration.syncer.conftest import LOCAL
from tests.support import forgery
from tests.support.dict_objects import DictObjects
from tests.support.raw_learner import Stubs, connected, hex_id, refused

NUMEL = 2**18


async def _pushed(stubs: Stubs, name: str = "draft") -> types.Run:
    """Returns a draft whose first fragment has compressed zeros, and whose second what nothing compresses."""
    request_id = hex_id(random.Random(3))
    create = runs.CreateRunRequest(
        request_id=request_id,
        name=name,
        tensors=[types.Tensor(name=one, shape=[NUMEL], dtype="float32") for one in ("a", "b")],
        fragments=[types.Fragment(name=one, tensors=[one]) for one in ("a", "b")],
    )
    run = (await stubs.runs.CreateRun(create)).run
    noise = np.random.default_rng(1).standard_normal(NUMEL).astype(np.float32)
    payload = zstandard.ZstdCompressor().compress(bytes(4 * NUMEL))
    zeros = forgery.frame(payload, compressor=Compressor.ZSTD, numel=NUMEL, raw_size=4 * NUMEL)
    for number, (fragment, data, raw) in enumerate(
        [("a", zeros, bytes(4 * NUMEL)), ("b", forgery.float32_frame(noise), noise.tobytes())]
    ):
        header = exchange.PushHeader(
            run=name, run_uid=run.uid, learner_id="creator", session_id=request_id, fragment=fragment, base_version=-1
        )
        header.delta_id = f"{number:032x}"
        digest = blake3(raw).digest()
        await stubs.exchange.PushDelta(iter(forgery.messages(header, data, numel=NUMEL, digest=digest)))
    return run


async def _stored(stubs: Stubs, run: types.Run) -> list[str]:
    """Returns the fragments that have a version."""
    found = (await stubs.runs.GetRun(runs.GetRunRequest(name=run.name, run_uid=run.uid))).run
    return [one.fragment for one in found.versions]


async def test_a_run_that_another_syncer_committed_has_its_weights_as_soon_as_it_has_its_name(store_url: str) -> None:
    settings = replace(LOCAL, host=HostSettings(name_lifetime_s=0.0))
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(serving(open_objects(store_url), settings)) for _ in range(2)]
        here, there = [await stack.enter_async_context(connected(server.port)) for server in servers]
        for number in range(10):
            draft = await _pushed(here, f"draft-{number}")
            await _stored(there, draft)
            await here.runs.CommitRun(runs.CommitRunRequest(name=draft.name, run_uid=draft.uid))
            run = (await there.runs.GetRun(runs.GetRunRequest(name=draft.name))).run
            assert [version.fragment for version in run.versions] == ["a", "b"]


async def test_the_first_weights_of_a_run_are_those_of_the_learner_that_created_it() -> None:
    async with serving(DictObjects(), LOCAL) as server:
        weights = {"w": np.ones((30, 30), np.float32)}
        target = f"127.0.0.1:{server.port}"

        def create() -> None:
            with ArrayLearner(weights, target=target, run="mine", learner_id="us-east", create=True):
                pass

        await asyncio.to_thread(create)
        state = (await server.host.open("mine")).state
        creators = {one.item.learner for one in state.deltas.values() if one.item.base_version == INITIAL_BASE}
        assert creators == {"us-east"}


async def test_a_draft_is_not_followed(stubs: Stubs) -> None:
    draft = await _pushed(stubs)
    with refused("RUN_DRAFT", grpc.StatusCode.FAILED_PRECONDITION):
        await stubs.exchange.Watch(exchange.WatchRequest(run="draft", run_uid=draft.uid)).read()
