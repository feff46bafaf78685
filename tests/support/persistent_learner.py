"""A learner that repeats the same bytes until they are answered, whatever happens to its syncer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import grpc
import numpy as np

from skerry.v1 import exchange_pb2 as exchange
from skerry.v1 import types_pb2 as types
from tests.support.raw_learner import INT4, Pulled, RawLearner, is_answer_lost, layout, pull, push_messages, refusal_of

Argument = TypeVar("Argument")
Answer = TypeVar("Answer")

# Pause between two attempts while the syncer is unavailable.
PAUSE_S: Final = 0.05
# Status codes after which the call is repeated.
AWAY: Final = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.UNKNOWN)


class PersistentLearner:
    """Trains one fragment through outages; counts what was acknowledged."""

    def __init__(self, learner: RawLearner, fragment: str) -> None:
        self.learner = learner
        self.fragment = fragment
        self.acknowledged: set[str] = set()
        self.numbers = np.random.default_rng(learner.source.getrandbits(32))

    async def train(self, stop: asyncio.Event) -> None:
        base = await self._until_answered(self._pull, None)
        while not stop.is_set():
            header = self.learner.header(base, self.fragment)
            values = (0.01 * self.numbers.standard_normal(layout(self.fragment).numel)).astype(np.float32)
            messages = push_messages(header, values, INT4)
            if await self._until_answered(self._push, messages):
                self.acknowledged.add(header.delta_id)
                await self._known_fate(header, stop)
            base = await self._until_answered(self._pull, base)

    async def _pull(self, base: Pulled | None) -> Pulled:
        return await pull(self.learner.stubs, self.learner.run, self.fragment, base=base)

    async def _push(self, messages: list[exchange.PushDeltaRequest]) -> bool:
        try:
            answer = await self.learner.stubs.exchange.PushDelta(iter(messages))
        except grpc.aio.AioRpcError as error:
            if error.code() in AWAY or is_answer_lost(error):
                raise
            if refusal_of(error).reason != "BASE_STALE":  # others were faster, and nothing else is to be expected
                raise
            return False
        assert answer.state == exchange.PUSH_STATE_ACCEPTED
        return True

    async def _known_fate(self, header: exchange.PushHeader, stop: asyncio.Event) -> None:
        while not stop.is_set():
            found = await self._until_answered(self.learner.query, header)
            assert found.state == exchange.PUSH_STATE_ACCEPTED, "acknowledged, and gone"
            if found.fate.fate != types.FATE_PENDING:
                return
            await asyncio.sleep(PAUSE_S)

    async def _until_answered(self, call: Callable[[Argument], Awaitable[Answer]], argument: Argument) -> Answer:
        while True:
            try:
                return await call(argument)
            except grpc.aio.AioRpcError as error:
                if error.code() not in AWAY and not is_answer_lost(error):
                    raise
            await asyncio.sleep(PAUSE_S)


async def until_more(persistent: list[PersistentLearner], count: int) -> None:
    async with asyncio.timeout(30):
        while sum(len(one.acknowledged) for one in persistent) < count:
            await asyncio.sleep(PAUSE_S)
