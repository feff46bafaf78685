"""A learner as processes of the simulation: a real exchange loop, and training whose every step can be recognised.

Step n of a process adds a vector of its own to the weights. So the contents of a delta tell which steps it holds, and
the auditor need not believe its header.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from skerry.errors import RunClosedError, SkerryError, is_transient
from skerry.exchange.boundary import Boundary
from skerry.exchange.loop import ExchangeLoop
from skerry.exchange.session import Calls
from skerry.exchange.settings import ExchangeSettings
from skerry.model.interface import ArrayParameters
from skerry.net.retry import Retry, RetrySettings
from skerry.runtime.workers import InlineWorkers
from skerry.wire.policy import Policy
from tests.simulation.network import Network
from tests.simulation.processes import Process
from tests.simulation.records import LearnerRecord
from tests.simulation.sim_transport import SimTransport
from tests.support.seeded_entropy import SeededEntropy

RUN: Final = "sim"
# Tiny, with everything that a layout may have: an embedding, matrices, vectors, sizes that no block divides.
SHAPES: Final[dict[str, tuple[int, ...]]] = {
    "embed.weight": (12, 4),
    "first.weight": (5, 7),
    "first.bias": (5,),
    "second.weight": (4, 6),
    "second.bias": (3,),
}
_STEP_SIZE: Final = 0.1
_TOKENS: Final = 100
_REJOIN_S: Final = 3.0
# How long a flush waits until everything is acknowledged.
_FLUSH_S: Final = 30.0


@dataclass(eq=False)
class LearnerProcess:
    """One learner id: the processes that ran under it, one after another, and their records; `boot` starts one."""

    name: str
    network: Network
    policy: Policy
    step_s: float  # what a step takes, about
    seed: str
    count: Callable[[], int]
    lane_bytes: int
    records: list[LearnerRecord] = field(default_factory=list)
    exchange: ExchangeLoop | None = None  # the newest process's, once it has joined
    processes: list[Process] = field(default_factory=list)
    transport: SimTransport | None = None  # the newest process's
    is_training: bool = True
    poison: float | None = None  # the next step multiplies some weights by it; it may be infinite
    flush_count: int = 0  # after each of so many of the next steps training waits until all work is acknowledged

    @property
    def process(self) -> Process:
        """The newest process, alive or dead."""
        return self.processes[-1]

    @property
    def record(self) -> LearnerRecord:
        """The newest process's record."""
        return self.records[-1]

    def longest_call_s(self, replica: int) -> float:
        """Returns how long the oldest call of the newest process to a replica has lasted."""
        return 0.0 if self.transport is None else self.transport.replicas[replica].longest_call_s

    def boot(self) -> None:
        """Starts a new process, beside the one that is there or after it."""
        incarnation = len(self.processes)
        for record in self.records:
            record.may_be_fenced = True
            record.is_newest = False
        record = LearnerRecord(self.name, incarnation, may_be_fenced=incarnation > 0)
        record.work = {name: [np.zeros(int(np.prod(shape)))] for name, shape in SHAPES.items()}
        process = Process(f"{self.name}.{incarnation}")
        self.processes.append(process)
        self.records.append(record)
        self.exchange = self.transport = None
        process.start(self._main(record))

    def kill(self, *, with_reset: bool) -> None:
        """Kills the newest process; its host, if it lives on, resets the connections."""
        self.process.kill()
        self.record.is_newest = False
        for link in self.network.links(self.name, None):
            for call in list(link.calls):
                if with_reset:
                    call.break_off()
                else:
                    self.network.make_half_open(call)

    async def _main(self, record: LearnerRecord) -> None:
        """Joins, trains and leaves; starts over after a failure, as a supervisor would restart it."""
        attempt = 0
        while True:
            try:
                await self._live(record, attempt)
                return
            except RunClosedError as error:
                record.failure = error
                return
            except SkerryError:
                attempt += 1
                await asyncio.sleep(_REJOIN_S)

    async def _live(self, record: LearnerRecord, attempt: int) -> None:
        seed = f"{self.seed}/{record.incarnation}/{attempt}"
        arrays = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
        transport = SimTransport(self.network, record, self.count)
        if record is self.record:
            self.transport = transport
        retry = Retry(RetrySettings(), random.Random(f"{seed}/jitter"), is_transient)
        exchange = ExchangeLoop(
            Calls(transport, retry, lane_bytes=self.lane_bytes),
            ArrayParameters(arrays),
            ExchangeSettings(
                run=RUN,
                learner_id=self.name,
                create=True,
                policy=self.policy,
                fragment_count=3,
            ),
            workers=InlineWorkers(),
            entropy=SeededEntropy(random.Random(f"{seed}/ids")),
            boundary=Boundary(_LoopClock(), asyncio.get_running_loop().call_soon),
        )
        await exchange.join()
        running = asyncio.create_task(exchange.run())
        running.add_done_callback(lambda _: _note_defect(exchange, record))
        try:
            await exchange.wait_attached()
            if record is self.record:
                self.exchange = exchange
            await self._train(record, exchange, arrays, random.Random(f"{seed}/work"))
            await self._leave(record, exchange)
        finally:
            # Not by cancelling: a task group cancels its tasks in the order of their addresses.
            await exchange.leave()
        await asyncio.wait([running])

    async def _train(
        self,
        record: LearnerRecord,
        exchange: ExchangeLoop,
        arrays: dict[str, NDArray[np.float32]],
        source: random.Random,
    ) -> None:
        noise = np.random.default_rng(source.getrandbits(64))
        while self.is_training:
            await asyncio.sleep(self.step_s * source.uniform(0.9, 1.1))
            for name, array in arrays.items():
                vector = (noise.standard_normal(array.size) * _STEP_SIZE).astype(np.float32)
                np.add(array, vector.reshape(array.shape), out=array)
                record.work[name].append(record.work[name][-1] + vector)
            if self.poison is not None and record is self.record:
                arrays["first.weight"] *= np.float32(self.poison)
                self.poison = None
                record.is_dirty = True
            record.step_count += 1
            exchange.step(_TOKENS, loss=1.0)
            record.longest_stall_s = exchange.stats.stall_s_max
            record.failure = exchange.stats.failure
            if self.flush_count and record is self.record:
                record.failed_flush_count += not await self._flush(exchange, is_last=False)
                self.flush_count -= 1

    async def _flush(self, exchange: ExchangeLoop, *, is_last: bool) -> bool:
        """Does what a learner's `flush` does, without a thread to wait in."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + _FLUSH_S
        exchange.flush(is_last=is_last)
        while not (is_flushed := exchange.is_flushed) and loop.time() < deadline_s:
            exchange._boundary.work()
            await asyncio.sleep(0.1)
        exchange.end_flush()
        return is_flushed

    async def _leave(self, record: LearnerRecord, exchange: ExchangeLoop) -> None:
        is_flushed = await self._flush(exchange, is_last=True)
        record.has_flushed = is_flushed and not exchange.stats.is_closed
        record.failure = exchange.stats.failure
        await exchange.leave()
        record.has_left = True


def _note_defect(exchange: ExchangeLoop, record: LearnerRecord) -> None:
    failure = exchange.stats.failure
    if failure is not None and failure.reason == "DEFECT":
        record.contradictions.append(str(failure))


class _LoopClock:
    """The client's clock on virtual time."""

    def monotonic_s(self) -> float:
        """Returns virtual seconds."""
        return asyncio.get_running_loop().time()
