"""Attacks by merges of a client's own run, whose deltas of zeros cost a few kilobytes to send."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any, Final

import zstandard
from blake3 import blake3

from skerry.v1 import exchange_pb2 as exchange
from skerry.v1 import runs_pb2 as runs
from skerry.v1 import types_pb2 as types
from skerry.wire.codecs import Compressor
from tests.attacks.target import ATTACKER, Attack, Target
from tests.attacks.wire import told_by
from tests.support import forgery
from tests.support.raw_learner import QUICK, RawLearner, Stubs, hex_id

FRAME_NUMEL: Final = 2**18
_NAME: Final = "own"


def zeros_data(count: int) -> bytes:
    """Returns so many frames of compressed zeros, each of which decodes to 1 MiB."""
    payload = zstandard.ZstdCompressor(level=19).compress(bytes(4 * FRAME_NUMEL))
    return b"".join(
        forgery.frame(
            payload,
            compressor=Compressor.ZSTD,
            first=number * FRAME_NUMEL,
            numel=FRAME_NUMEL,
            raw_size=4 * FRAME_NUMEL,
        )
        for number in range(count)
    )


async def _push(stubs: Stubs, frames: int, source: random.Random, **facts: Any) -> None:
    """Pushes zeros."""
    numel = frames * FRAME_NUMEL
    header = exchange.PushHeader(run=_NAME, learner_id=ATTACKER, delta_id=hex_id(source), **facts)
    digest = blake3(bytes(4 * numel)).digest()
    await stubs.exchange.PushDelta(iter(forgery.messages(header, zeros_data(frames), numel=numel, digest=digest)))


async def _create(target: Target, fragments: int, frames: int, *, tensors: int = 1, **policy: float) -> None:
    """Commits a run of so many fragments of so many frames and tensors."""
    source = random.Random(1)
    names = {f"f{of}": [f"{of}.{number:x}" for number in range(tensors)] for of in range(fragments)}
    first = [frames * FRAME_NUMEL - tensors + 1]  # the elements of the first tensor; all others have one
    session = hex_id(source)
    create = runs.CreateRunRequest(
        request_id=session,
        name=_NAME,
        tensors=[
            types.Tensor(name=one, shape=[] if number else first)
            for tensors_of in names.values()
            for number, one in enumerate(tensors_of)
        ],
        fragments=[types.Fragment(name=one, tensors=tensors_of) for one, tensors_of in names.items()],
        policy=types.Policy(**policy),  # type: ignore[arg-type]  # numbers
    )
    create.policy.MergeFrom(QUICK)
    async with target.connected() as stubs:
        uid = (await stubs.runs.CreateRun(create)).run.uid
        for name in names:
            await _push(stubs, frames, source, run_uid=uid, session_id=session, fragment=name, base_version=-1)
        await stubs.runs.CommitRun(runs.CommitRunRequest(name=_NAME, run_uid=uid))


async def _train(target: Target, frames: int, told: Counter[str]) -> None:
    """Pushes to each fragment again as soon as the last delta is merged, without end."""
    async with target.connected() as stubs:
        run = (await stubs.runs.GetRun(runs.GetRunRequest(name=_NAME))).run
        learner = RawLearner(stubs, run, ATTACKER, random.Random(2))
        call: Any = stubs.exchange.Attach(None)
        hello = exchange.Hello(run=run.name, run_uid=run.uid, learner_id=ATTACKER, session_id=learner.session)
        await call.write(exchange.AttachRequest(hello=hello))
        await call.read()
        merged = {one.fragment: asyncio.Queue[types.FragmentVersion]() for one in run.versions}

        async def listen() -> None:
            while response := await call.read():
                if response.event.HasField("version_committed"):
                    version = response.event.version_committed.version
                    merged[version.fragment].put_nowait(version)
                    told["merges"] += 1

        async def push(version: types.FragmentVersion) -> None:
            steps = {"step_count": 4, "token_count": 400, "last_step": 4}
            named = {"run_uid": run.uid, "session_id": learner.session, "fragment": version.fragment}
            while True:
                base = {"base_version": version.version, "base_digest": version.digest}
                await told_by(_push(stubs, frames, learner.source, **named, **base, **steps), told)
                version = await merged[version.fragment].get()

        await asyncio.gather(listen(), *(push(version) for version in run.versions))


async def create_storing(target: Target, _store_url: str) -> None:
    """Prepares `own_snapshots`."""
    await _create(target, 1, 16, snapshot_ratio=0, kept_version_count=64, kept_hours=24)


async def own_snapshots(target: Target, told: Counter[str]) -> None:
    """Has a run of its own store three snapshots of 16 MiB for each delta of 2 KiB, and keep them for a day."""
    await _train(target, 16, told)


async def create_large(target: Target, _store_url: str) -> None:
    """Prepares `own_merges`."""
    await _create(target, 16, 6, snapshot_ratio=1e6)


async def own_merges(target: Target, told: Counter[str]) -> None:
    """Has a run of its own merge 16 fragments of 6 MiB each at the same time, for deltas of 1 KiB."""
    await _train(target, 6, told)


async def create_wide(target: Target, _store_url: str) -> None:
    """Prepares `own_norms`."""
    await _create(target, 1, 1, tensors=60_000)


async def own_norms(target: Target, told: Counter[str]) -> None:
    """Has a run of its own accept deltas of 60,000 tensors, each of which has a norm in the log."""
    await _train(target, 1, told)


OWN_RUNS: Final[tuple[Attack, ...]] = (own_snapshots, own_merges, own_norms)
