"""Attacks by messages that cost little to send, and made a syncer work for long."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, Final

import grpc
import numpy as np
from blake3 import blake3

from skerry.v1 import exchange_pb2 as exchange
from skerry.v1 import runs_pb2 as runs
from skerry.v1 import types_pb2 as types
from tests.attacks.target import ATTACKER, Attack, Target
from tests.attacks.wire import told_by
from tests.support import forgery
from tests.support.raw_learner import FLOAT32, RawLearner, Stubs, hex_id, layout, part_messages, pull

_TENSORS: Final = 60_000
_LEARNERS: Final = 200
_NO_POSITION: Final = 2**47


async def _again(stubs: Stubs, count: int, one: Callable[[Stubs], Awaitable[Any]], told: Counter[str]) -> None:
    """Makes so many calls at once, again and again."""

    async def calling() -> None:
        while True:
            await told_by(one(stubs), told)
            told["calls"] += 1

    await asyncio.gather(*(calling() for _ in range(count)))


def _wide(request_id: str, tensor_count: int, name: str = "wide") -> runs.CreateRunRequest:
    """Returns the request for a draft of so many tensors of one element."""
    names = [f"{number:x}" for number in range(tensor_count)]
    return runs.CreateRunRequest(
        request_id=request_id,
        name=name,
        tensors=[types.Tensor(name=one) for one in names],
        fragments=[types.Fragment(name="all", tensors=names)],
    )


async def wide_parts(target: Target, told: Counter[str]) -> None:
    """Pushes parts of one element to a draft of 60,000 tensors, without end."""
    request_id = hex_id(random.Random(1))
    data = np.ones(1, np.float32).tobytes()
    digest = blake3(data).digest()
    async with target.connected() as stubs:
        uid = (await stubs.runs.CreateRun(_wide(request_id, _TENSORS))).run.uid
        header = exchange.PushHeader(
            run="wide",
            run_uid=uid,
            learner_id=ATTACKER,
            session_id=request_id,
            delta_id=request_id,
            fragment="all",
            base_version=-1,
        )
        call: Any = stubs.exchange.PushDelta(None)
        await call.write(exchange.PushDeltaRequest(header=header))
        for first in range(_TENSORS):
            frame = forgery.frame(data, first=first, numel=1, raw_size=4)
            begin = exchange.PartBegin(first=first, numel=1, size_bytes=len(frame))
            await call.write(exchange.PushDeltaRequest(part=begin))
            await call.write(exchange.PushDeltaRequest(data=frame))
            await call.write(exchange.PushDeltaRequest(part_end=exchange.PartEnd(digest=digest)))
            told["parts"] += 1


async def empty_entries(target: Target, told: Counter[str]) -> None:
    """Attaches and reports two million fragments without names, again and again."""
    report = exchange.AttachRequest(report=types.LearnerReport(adopted=[types.FragmentVersion()] * 2_000_000))
    async with target.connected() as stubs:
        run = (await stubs.runs.GetRun(runs.GetRunRequest(name="demo"))).run

        async def reporting() -> None:
            learner = RawLearner(stubs, run, ATTACKER, random.Random(1))
            await learner.attach()
            assert learner.call is not None
            await learner.call.write(report)
            while await learner.call.read():
                pass

        while True:
            await told_by(reporting(), told)


async def empty_data(target: Target, told: Counter[str]) -> None:
    """Pushes messages without bytes in 100 streams at once."""
    async with target.connected() as stubs:
        run = (await stubs.runs.GetRun(runs.GetRunRequest(name="demo"))).run
        learner = RawLearner(stubs, run, ATTACKER, random.Random(1))
        await learner.attach()
        base = await pull(stubs, run, "body")

        async def push(number: int) -> None:
            call: Any = stubs.exchange.PushDelta(None)
            header = learner.header(base, "body")
            header.delta_id = hex_id(random.Random(number))
            await call.write(exchange.PushDeltaRequest(header=header))
            await call.write(exchange.PushDeltaRequest(part=exchange.PartBegin(numel=1, size_bytes=100)))
            while True:
                await call.write(exchange.PushDeltaRequest(data=b""))
                told["messages"] += 1

        await asyncio.gather(*(push(number) for number in range(100)))


async def unfinished_deltas(target: Target, told: Counter[str]) -> None:
    """Pushes a part of one delta after another to the run of all, without the rest, 16 at once."""
    async with target.connected() as stubs:
        run = (await stubs.runs.GetRun(runs.GetRunRequest(name="demo"))).run
        learner = RawLearner(stubs, run, ATTACKER, random.Random(1))
        await learner.attach()
        part, _ = part_messages(np.ones(600, np.float32), layout("body"), FLOAT32, 0, 600)

        async def push() -> None:
            for count in itertools.count():
                if count % 3 == 0:  # before it is too old
                    base = await pull(stubs, run, "body")
                header = exchange.PushDeltaRequest(header=learner.header(base, "body"))
                learner.pushed.clear()
                await told_by(stubs.exchange.PushDelta(iter([header, *part])), told)
                told["parts"] += 1

        await asyncio.gather(*(push() for _ in range(16)))


async def wrong_hellos(target: Target, told: Counter[str]) -> None:
    """Attaches to a draft of 60,000 tensors with one that it does not have, 64 times at once."""
    request_id = hex_id(random.Random(1))
    async with target.connected() as stubs:
        uid = (await stubs.runs.CreateRun(_wide(request_id, _TENSORS))).run.uid
        hello = exchange.Hello(
            run="wide",
            run_uid=uid,
            learner_id=ATTACKER,
            session_id=request_id,
            tensors=[types.Tensor(name="none", shape=[1])],
        )

        def attach(stubs: Stubs) -> Any:
            return stubs.exchange.Attach(iter([exchange.AttachRequest(hello=hello)])).read()

        await _again(stubs, 64, attach, told)


async def small_creates(target: Target, told: Counter[str]) -> None:
    """Creates drafts of 4,600 tensors, of which one is in no fragment, 16 at once."""
    request = _wide(hex_id(random.Random(1)), 4_600)
    request.tensors.append(types.Tensor(name="none"))
    async with target.connected() as stubs:
        await _again(stubs, 16, lambda stubs: stubs.runs.CreateRun(request), told)


async def attach_some(target: Target, _store_url: str) -> None:
    """Has 200 learners report once, as far as the server lets one client do that."""
    async with target.connected() as stubs:
        run = (await stubs.runs.GetRun(runs.GetRunRequest(name="demo"))).run
        for number in range(_LEARNERS if target.keys is None else 1):
            learner = RawLearner(stubs, run, f"{ATTACKER}{number or ''}", random.Random(number))
            await learner.attach()
            await learner.report()
            learner.detach()


async def new_watches(target: Target, told: Counter[str]) -> None:
    """Begins to watch a run of 200 learners and stops at once, 32 times at the same time."""

    async def watch(stubs: Stubs) -> None:
        call: Any = stubs.exchange.Watch(exchange.WatchRequest(run="demo"))
        await call.read()
        call.cancel()

    async with target.connected() as stubs:
        await _again(stubs, 32, watch, told)


async def lost_positions(target: Target, told: Counter[str]) -> None:
    """Claims to have seen a log position that never was, 100 times at once."""
    request = exchange.PullFragmentRequest(run="demo", fragment="body", is_newest=True, seen_position=_NO_POSITION)
    async with target.connected() as stubs:
        await _again(stubs, 100, lambda stubs: stubs.exchange.PullFragment(request).read(), told)


async def long_checks(target: Target, told: Counter[str]) -> None:
    """Asks for the health with a megabyte of what is no field, 8 times at once."""
    async with target.connected() as stubs:
        check: Any = stubs.channel.unary_unary("/grpc.health.v1.Health/Check", None, None)
        message = b"\x18\x00" * 2**19
        await _again(stubs, 8, lambda _: check(message, timeout=10, compression=grpc.Compression.NoCompression), told)


CHEAP: Final[tuple[Attack, ...]] = (
    wide_parts,
    empty_entries,
    empty_data,
    unfinished_deltas,
    wrong_hellos,
    small_creates,
    new_watches,
    lost_positions,
    long_checks,
)
