"""Drafts: what a client may have a store keep without sending it."""

from __future__ import annotations

import asyncio
import hashlib
import random
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import grpc
import numpy as np
import pytest
import zstandard

from skerry.v1 import exchange_pb2 as exchange
from skerry.v1 import runs_pb2 as runs
from skerry.v1 import types_pb2 as types
from skerry.wire.codecs import Compressor
from skerry_syncer.run import host
from skerry_syncer.run.host import HostSettings
from skerry_syncer.server import serving
from skerry_syncer.store.objects.opening import open_objects
from tests.integration.syncer.conftest import LOCAL
from tests.support import forgery
from tests.support.made_keys import make_keys, tls_of
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
        digest = hashlib.sha256(raw).digest()
        await stubs.exchange.PushDelta(iter(forgery.messages(header, data, numel=NUMEL, digest=digest)))
    return run


async def _stored(stubs: Stubs, run: types.Run) -> list[str]:
    """Returns the fragments that have a version."""
    found = (await stubs.runs.GetRun(runs.GetRunRequest(name=run.name, run_uid=run.uid))).run
    return [one.fragment for one in found.versions]


async def test_weights_that_were_hardly_sent_are_stored_when_their_draft_is_committed(stubs: Stubs) -> None:
    draft = await _pushed(stubs)
    async with asyncio.timeout(20):
        while "b" not in await _stored(stubs, draft):  # the fragments' order is that of their names
            await asyncio.sleep(0.02)
    assert await _stored(stubs, draft) == ["b"]
    await stubs.runs.CommitRun(runs.CommitRunRequest(name=draft.name, run_uid=draft.uid))
    assert await _stored(stubs, draft) == ["a", "b"]


async def test_weights_that_were_not_sent_are_bounded(store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "UNSENT_BYTES", 2**20)
    monkeypatch.setattr(host, "UNSENT_PAUSE_S", 1.0)
    async with serving(open_objects(store_url), LOCAL) as server, connected(server.port) as stubs:
        first, second, third = [await _pushed(stubs, name) for name in ("first", "second", "third")]
        for draft in (first, second):  # the second is the first one that is beyond the bound
            await stubs.runs.CommitRun(runs.CommitRunRequest(name=draft.name, run_uid=draft.uid))
        with refused("QUOTA_EXCEEDED", grpc.StatusCode.RESOURCE_EXHAUSTED) as caught:
            await stubs.runs.CommitRun(runs.CommitRunRequest(name=third.name, run_uid=third.uid))
        assert caught.refusal.retry_after_s
        assert "a" not in await _stored(stubs, third)


async def test_weights_of_drafts_are_bounded_by_identity_until_their_draft_is_committed(
    store_url: str, tmp_path: Path
) -> None:
    """A part of a size that is not stated may have 16 MiB; this one has 1, and as much in version 0."""
    make_keys(tmp_path, "--server", "a.example", "--admin", "anna", "--admin", "bert")
    settings = replace(LOCAL, tls=tls_of(tmp_path, "a.example"), host=HostSettings(draft_bytes=49 * 2**19))
    async with serving(open_objects(store_url), settings) as server, AsyncExitStack() as stack:
        anna, bert = [
            await stack.enter_async_context(connected(server.port, tls_of(tmp_path, name))) for name in ("anna", "bert")
        ]
        first, *_ = [await _pushed(anna, f"draft-{number}") for number in range(3)]
        with refused("QUOTA_EXCEEDED", grpc.StatusCode.RESOURCE_EXHAUSTED) as caught:
            await _pushed(anna, "too-much")
        assert caught.refusal.retry_after_s
        assert "commit them" in caught.refusal.message
        await _pushed(bert, "of-another")
        await anna.runs.CommitRun(runs.CommitRunRequest(name=first.name, run_uid=first.uid))
        await _pushed(anna, "room-again")


async def test_weights_of_a_draft_that_another_syncer_committed_do_not_count(store_url: str) -> None:
    settings = replace(LOCAL, host=HostSettings(draft_bytes=20 * 2**20, sweep_s=0.2, name_lifetime_s=0.1))
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(serving(open_objects(store_url), settings)) for _ in range(2)]
        here, there = [await stack.enter_async_context(connected(server.port)) for server in servers]
        first = await _pushed(here, "first")
        with refused("QUOTA_EXCEEDED", grpc.StatusCode.RESOURCE_EXHAUSTED):
            await _pushed(here, "second")
        await there.runs.CommitRun(runs.CommitRunRequest(name=first.name, run_uid=first.uid))
        asked = runs.GetRunRequest(name=first.name, run_uid=first.uid)
        async with asyncio.timeout(20):
            while (await here.runs.GetRun(asked)).run.status != types.RUN_STATUS_OPEN:
                await asyncio.sleep(0.02)
        await _pushed(here, "second")


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
