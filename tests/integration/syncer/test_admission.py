"""Many pushes over slow links share the byte budget, in virtual time: links are filled, and nobody starves.

Parts, messages and the budget are 1/256 of their real sizes, so that many pushes can be decoded in a test.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import pytest

from skerry.runtime.workers import InlineWorkers
from skerry.v1 import exchange_pb2 as exchange
from skerry.v1 import runs_pb2 as runs
from skerry.v1 import types_pb2 as types
from skerry.wire.digests import delta_digest, part_digest
from skerry.wire.frames import encode_frames
from skerry.wire.layout import FragmentLayout, TensorSpec
from skerry_syncer.rpc.exchange import ExchangeServicer
from skerry_syncer.rpc.runs import RunsServicer
from skerry_syncer.run.host import HostSettings, RunHost
from skerry_syncer.run.push import SUGGESTED_PART_BYTES
from skerry_syncer.store.log.entries import SessionItem
from skerry_syncer.store.store import Store
from skerry_syncer.store.versions.scratch import Scratch
from tests.simulation.virtual_time import VirtualClock, run_virtual
from tests.support.dict_objects import DictObjects
from tests.support.raw_learner import FLOAT32
from tests.support.seeded_entropy import SeededEntropy

SCALE: Final = 256
PART_BYTES: Final = SUGGESTED_PART_BYTES // SCALE
MESSAGE_BYTES: Final = 2**20 // SCALE
PART_COUNT: Final = 4
PART_NUMEL: Final = (PART_BYTES - 64) // 4
LAYOUT: Final = FragmentLayout("body", (TensorSpec("weight", (PART_COUNT * PART_NUMEL,)),))
SLOW_BITS_PER_S: Final = 25e6
FAST_BITS_PER_S: Final = 1e9


@dataclass
class Outcome:
    """How a crowd of pushes went."""

    took_s: list[float]  # of each sender, in their order
    goodput_bits_per_s: float  # of all, until the last was accepted
    peak_bytes: int


def crowd(links: Sequence[float], *, budget_bytes: int, late: int = 0, late_s: float = 0.0) -> Outcome:
    """Has one learner push a delta over each of `links`, in bits a second; the last `late` begin `late_s` later.

    The memory is taken by then.
    """
    delays_s = [0.0] * (len(links) - late) + [late_s] * late
    return run_virtual(lambda: _crowd(links, delays_s, budget_bytes))


async def _crowd(links: Sequence[float], delays_s: Sequence[float], budget_bytes: int) -> Outcome:
    clock, entropy, workers = VirtualClock(), SeededEntropy(random.Random(1)), InlineWorkers()
    store = Store(DictObjects(), clock=clock, entropy=entropy, workers=workers, writer="test")
    settings = HostSettings(part_budget_bytes=budget_bytes)
    host = RunHost(store, clock=clock, entropy=entropy, workers=workers, scratch=Scratch(None), settings=settings)
    async with host.serving():
        servicer, run = ExchangeServicer(host), await _run(host, entropy.hex_id())
        replica = await host.open("demo")
        await replica.log.append([SessionItem(f"l{at}", f"{at:032x}", "here") for at in range(len(links))])
        messages, digest = _body()

        async def push(index: int, bits_per_s: float) -> float:
            header = exchange.PushHeader(
                run="demo",
                run_uid=run.uid,
                learner_id=f"l{index}",
                session_id=f"{index:032x}",
                delta_id=f"{index + 1:032x}",
                fragment="body",
                base_digest=bytes.fromhex(replica.state.fragments["body"].newest.digest),
                step_count=24,
                token_count=24,
                last_step=24,
            )
            await asyncio.sleep(delays_s[index])
            began_s = clock.monotonic_s()
            await servicer.PushDelta(_sent([_of(header), *messages, _complete(digest)], bits_per_s), None)
            return clock.monotonic_s() - began_s

        began_s = clock.monotonic_s()
        took_s = await asyncio.gather(*(push(*one) for one in enumerate(links)))
        bits = 8 * sum(len(message.data) for message in messages) * len(links)
        return Outcome(took_s, bits / (clock.monotonic_s() - began_s), host.budget.peak_bytes)


async def _sent(
    messages: Sequence[exchange.PushDeltaRequest], bits_per_s: float
) -> AsyncIterator[exchange.PushDeltaRequest]:
    """Yields messages as a link brings them; one that is not read holds up the next (HTTP/2 back-pressure)."""
    for message in messages:
        await asyncio.sleep(8 * len(message.data) / bits_per_s)
        yield message


async def _run(host: RunHost, request_id: str) -> types.Run:
    service, servicer = RunsServicer(host), ExchangeServicer(host)
    tensors = [types.Tensor(name=t.name, shape=t.shape, dtype="float32") for t in LAYOUT.tensors]
    fragments = [types.Fragment(name="body", tensors=["weight"])]
    policy = types.Policy(quorum_count=10_000)  # no round closes
    create = runs.CreateRunRequest(
        request_id=request_id, name="demo", tensors=tensors, fragments=fragments, policy=policy
    )
    run = (await service.CreateRun(create, None)).run
    header = exchange.PushHeader(
        run="demo",
        run_uid=run.uid,
        learner_id="creator",
        session_id=request_id,
        delta_id="f" * 32,
        fragment="body",
        base_version=-1,
    )
    messages, digest = _body()
    await servicer.PushDelta(_sent([_of(header), *messages, _complete(digest)], 1e12), None)
    return (await service.CommitRun(runs.CommitRunRequest(name="demo", run_uid=run.uid), None)).run


def _body() -> tuple[list[exchange.PushDeltaRequest], bytes]:
    """Returns the messages of all parts, and the delta's digest."""
    values = np.random.default_rng(1).standard_normal(LAYOUT.numel).astype(np.float32)
    messages: list[exchange.PushDeltaRequest] = []
    parts = []
    for first in range(0, LAYOUT.numel, PART_NUMEL):
        digest = part_digest()
        frames = encode_frames(values[first : first + PART_NUMEL], LAYOUT, FLOAT32, first=first, digest=digest)
        data = b"".join(frames)
        messages.append(exchange.PushDeltaRequest(part=_begin(first, len(data))))
        messages += [
            exchange.PushDeltaRequest(data=data[at : at + MESSAGE_BYTES]) for at in range(0, len(data), MESSAGE_BYTES)
        ]
        messages.append(exchange.PushDeltaRequest(part_end=exchange.PartEnd(digest=digest.digest())))
        parts.append((first, PART_NUMEL, digest.digest()))
    return messages, delta_digest(parts)


def _begin(first: int, size_bytes: int) -> exchange.PartBegin:
    return exchange.PartBegin(first=first, numel=PART_NUMEL, size_bytes=size_bytes)


def _of(header: exchange.PushHeader) -> exchange.PushDeltaRequest:
    return exchange.PushDeltaRequest(header=header)


def _complete(digest: bytes) -> exchange.PushDeltaRequest:
    return exchange.PushDeltaRequest(complete=exchange.PushComplete(digest=digest))


def test_the_links_of_256_slow_senders_are_filled() -> None:
    budget_bytes = HostSettings().part_budget_bytes // SCALE
    done = crowd([SLOW_BITS_PER_S] * 256, budget_bytes=budget_bytes)
    assert done.goodput_bits_per_s > 0.95 * 256 * SLOW_BITS_PER_S
    assert done.peak_bytes <= budget_bytes


@pytest.mark.parametrize("slot_count", [16, 64])
def test_while_memory_is_scarce_what_there_is_is_used_and_no_push_waits_for_ever(slot_count: int) -> None:
    done = crowd([SLOW_BITS_PER_S] * 256, budget_bytes=slot_count * PART_BYTES)
    assert done.goodput_bits_per_s > 0.9 * slot_count * SLOW_BITS_PER_S
    assert done.peak_bytes <= slot_count * PART_BYTES
    assert max(done.took_s) < 1.5 * min(done.took_s)


def test_slow_senders_do_not_starve_fast_ones() -> None:
    source = random.Random(1)
    links = [SLOW_BITS_PER_S * source.uniform(0.6, 1.4) for _ in range(252)] + [FAST_BITS_PER_S] * 4
    part_s = 8 * PART_BYTES / SLOW_BITS_PER_S
    done = crowd(links, budget_bytes=64 * PART_BYTES, late=4, late_s=6 * part_s)
    alone_s = 8 * PART_COUNT * PART_BYTES / FAST_BITS_PER_S
    assert max(done.took_s[252:]) < alone_s + part_s
    assert done.goodput_bits_per_s > 0.8 * 64 * SLOW_BITS_PER_S
