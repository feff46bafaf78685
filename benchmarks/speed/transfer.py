"""One learner's push of encoded parts until it is acknowledged, and its pull of a snapshot, over loopback.

The client's own push and pull against a real `skerry serve` with a durable store. Limits are a raw gRPC stream of as
many bytes between two processes, and writing and syncing them to a file on the same disk, in turns with the subject.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc
import numpy as np

from benchmarks.processes import Served, children, served
from benchmarks.report import Row
from benchmarks.speed.limits import RawStream, timed, write_and_sync
from benchmarks.speed.measuring import SEED, Size, paired, rates
from benchmarks.speed.models import arrays_of, layout_of
from skerry import Policy, RunsClient
from skerry.errors import is_transient
from skerry.exchange.boundary import Boundary
from skerry.exchange.pull import pull_newest
from skerry.exchange.push import Delta, Part, encode_parts, push
from skerry.exchange.session import Calls, Session
from skerry.exchange.settings import ExchangeSettings
from skerry.model.interface import ArrayParameters
from skerry.net.grpc_transport import GrpcTransport
from skerry.net.retry import Retry, RetrySettings
from skerry.runtime.clock import SystemClock
from skerry.runtime.identifiers import SystemEntropy
from skerry.runtime.workers import ThreadWorkers
from skerry.v1 import exchange_pb2, types_pb2
from skerry.v1.types_pb2 import Run
from skerry.wire.codecs import Codec, Compressor, Encoding
from skerry.wire.frames import encode_frames
from skerry.wire.layout import FragmentLayout

RUN: Final = "speed"
_PART_BYTES: Final = 4 * 2**20  # what a syncer suggests
ENCODINGS: Final = {
    Codec.INT4: Encoding(Codec.INT4),
    Codec.FLOAT32: Encoding(Codec.FLOAT32, compressor=Compressor.NONE),
}


@dataclass(frozen=True)
class Peer:
    """A learner that calls the exchange itself; it has no training."""

    session: Session
    run: Run
    layout: FragmentLayout

    def delta(self, parts: tuple[Part, ...], *, step_count: int) -> Delta:
        """Returns these parts as a delta of version 0; one of fewer than H steps opens no round."""
        header = exchange_pb2.PushHeader(
            run=self.run.name,
            run_uid=self.run.uid,
            learner_id=self.session.settings.learner_id,
            session_id=self.session.session_id,
            delta_id=self.session.entropy.hex_id(),
            fragment=self.layout.name,
            base_version=0,
            base_digest=self.run.versions[0].digest,
            step_count=step_count,
            token_count=step_count,
            last_step=step_count,
        )
        return Delta(header, parts)

    async def push(self, delta: Delta) -> None:
        """Pushes until the delta is acknowledged, and so durable."""
        session = self.session
        await push(session.calls, delta, seen_position=self.run.position, stored=(), tally=session.tally)


@asynccontextmanager
async def peer(
    syncer: Served, run: Run, layout: FragmentLayout, learner_id: str, transport: GrpcTransport | None = None
) -> AsyncIterator[Peer]:
    """Yields a learner whose session the syncer knows; its attachment ends with the context.

    It closes its connections then, but for those of `transport`.
    """
    workers, entropy = ThreadWorkers(2), SystemEntropy()
    own = transport is None
    transport = transport or GrpcTransport(syncer.target)
    boundary = Boundary(SystemClock(), asyncio.get_running_loop().call_soon_threadsafe)
    session = Session(
        Calls(transport, Retry(RetrySettings(), random.Random(SEED), is_transient)),
        ArrayParameters({"unused": np.zeros(1, np.float32)}),
        ExchangeSettings(run=run.name, learner_id=learner_id),
        workers=workers,
        entropy=entropy,
        boundary=boundary,
    )
    session.run_uid = run.uid
    left = asyncio.Event()

    async def requests() -> AsyncIterator[exchange_pb2.AttachRequest]:
        tensors = [types_pb2.Tensor(name=one.name, shape=one.shape, dtype="float32") for one in layout.tensors]
        yield exchange_pb2.AttachRequest(
            hello=exchange_pb2.Hello(
                run=run.name, run_uid=run.uid, learner_id=learner_id, session_id=session.session_id, tensors=tensors
            )
        )
        await left.wait()

    attachment = transport.attach(requests())
    try:
        await anext(attachment)
        yield Peer(session, run, layout)
    finally:
        left.set()
        await attachment.aclose()
        if own:
            await transport.close()
        workers.close()


def create_run(syncer: Served, numel: int, policy: Policy) -> tuple[Run, FragmentLayout]:
    """Creates a run of one fragment."""
    layout = layout_of(numel)
    with RunsClient(syncer.target, timeout_s=120.0) as client:
        return client.create_run(RUN, arrays_of(numel), policy=policy, fragments=[layout]), layout


def encoded_delta(layout: FragmentLayout, codec: Codec) -> tuple[Part, ...]:
    """Returns the parts of a delta of normal values."""
    values = np.random.default_rng(SEED).standard_normal(layout.numel, np.float32)
    values *= np.float32(1e-3)
    return encode_parts(encode_frames, values, layout, ENCODINGS[codec], _PART_BYTES)


@asynccontextmanager
async def raw_stream(folder: Path) -> AsyncIterator[RawStream]:
    """Yields a connection to a raw gRPC server in another process."""
    with children("benchmarks.speed.limits", [[]], folder) as (server,):
        port = server.hear()["port"]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield RawStream(channel)


async def _measure(folder: Path, syncer: Served, size: Size) -> list[Row]:
    numel = size.pick(50_300_000, 5_000_000)
    policy = Policy(quorum_count=10_000, lease_term_s=60.0)
    run, layout = await asyncio.to_thread(create_run, syncer, numel, policy)
    rows: list[Row] = []
    async with raw_stream(folder) as raw:
        for codec in ENCODINGS:
            rows += await _push_rows(folder, syncer, run, layout, raw=raw, codec=codec, samples=size.samples)
        async with peer(syncer, run, layout, "puller") as puller:
            rows += await _pull_rows(puller, raw, size.samples)
    return rows


async def _push_rows(
    folder: Path, syncer: Served, run: Run, layout: FragmentLayout, *, raw: RawStream, codec: Codec, samples: int
) -> list[Row]:
    parts = encoded_delta(layout, codec)
    size_bytes = sum(len(frame) for part in parts for frame in part.frames)
    found: dict[str, list[float]] = {"push": [], "raw": [], "disk": []}
    connections = GrpcTransport(syncer.target)  # which a learner keeps from one push to the next
    for sample in range(samples + 1):
        # A session may push one delta of a base.
        async with peer(syncer, run, layout, f"pusher-{codec}-{sample}", connections) as pusher:
            delta = pusher.delta(parts, step_count=1)
            push_s = await timed(lambda pusher=pusher, delta=delta: pusher.push(delta))  # type: ignore[misc]
        raw_s = await timed(lambda: raw.push(size_bytes))
        start_s = time.perf_counter()
        write_and_sync(folder, size_bytes)
        disk_s = time.perf_counter() - start_s
        if sample:
            for name, seconds in (("push", push_s), ("raw", raw_s), ("disk", disk_s)):
                found[name].append(seconds)
    await connections.close()
    speed = {name: rates(size_bytes / 1e6, seconds) for name, seconds in found.items()}
    slower = [min(pair) for pair in zip(speed["raw"], speed["disk"], strict=True)]
    case = f"{codec}, {layout.numel / 1e6:.3g}M parameters, {size_bytes / 1e6:.3g} MB"
    return [
        paired(case, "push until durable / slower of the two limits", speed["push"], "MB/s", limits=slower),
        paired(case, "push until durable / raw gRPC stream", speed["push"], "MB/s", limits=speed["raw"]),
        paired(case, "push until durable / write and sync", speed["push"], "MB/s", limits=speed["disk"]),
    ]


async def _pull_rows(puller: Peer, raw: RawStream, samples: int) -> list[Row]:
    layout, size_bytes = puller.layout, 4 * puller.layout.numel
    found: dict[str, list[float]] = {"pull": [], "raw": []}

    async def pull() -> Any:
        return await pull_newest(puller.session, layout)

    for sample in range(samples + 1):
        pull_s, raw_s = await timed(pull), await timed(lambda: raw.pull(size_bytes))
        if sample:
            found["pull"].append(pull_s)
            found["raw"].append(raw_s)
    speed = {name: rates(size_bytes / 1e6, seconds) for name, seconds in found.items()}
    case = f"snapshot, {layout.numel / 1e6:.3g}M parameters, {size_bytes / 1e6:.3g} MB"
    return [paired(case, "pull and check / raw gRPC stream", speed["pull"], "MB/s", limits=speed["raw"])]


def rows(size: Size) -> Iterator[Row]:
    """Pushes with int4 and float32, and pulls of a snapshot."""
    with tempfile.TemporaryDirectory(prefix="skerry-benchmark-") as name, served(Path(name)) as syncer:
        yield from asyncio.run(_measure(Path(name), syncer, size))
