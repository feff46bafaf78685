"""Islands in virtual time: the product's own servicers, rounds, merge, codecs, schedule and adoption, without sockets.

One syncer replica on a store in memory, and learners whose every step is real training. Time is virtual: a step takes
as long as its island's speed says, a message as long as the arm's delay says, and computing takes none.
"""

from __future__ import annotations

import asyncio
import logging
import random
import statistics
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import torch

from benchmarks.quality import task
from benchmarks.quality.arms import Island, Islands, Outcome
from benchmarks.quality.bulk_transport import BulkTransport
from skerry.algorithm.rebase import FlatArray
from skerry.errors import SkerryError, StopExchangingError, is_transient
from skerry.exchange.boundary import Boundary
from skerry.exchange.loop import ExchangeLoop
from skerry.exchange.session import Calls
from skerry.exchange.settings import ExchangeSettings
from skerry.model.interface import Work
from skerry.model.torch.parameters import TorchParameters
from skerry.net.retry import Retry, RetrySettings
from skerry.runtime.workers import InlineWorkers
from skerry.v1 import runs_pb2
from skerry.wire.layout import FragmentLayout
from skerry.wire.policy import Policy
from skerry_learner.schedule import run_position
from skerry_syncer.run.host import HostSettings
from skerry_syncer.settings import ReplicaSettings
from skerry_syncer.store.log.entries import Fate, RunStatus
from skerry_syncer.store.log.run_log import RunLog
from skerry_syncer.store.log.state import RunState
from skerry_syncer.store.versions.replay import Replayer
from skerry_syncer.store.versions.scratch import Scratch
from tests.simulation.network import Endpoint, Network, NetworkFaults
from tests.simulation.processes import Process, ProcessLoop
from tests.simulation.records import LearnerRecord
from tests.simulation.replica_process import ReplicaProcess
from tests.simulation.shared_store import SharedStore, StoreFaults
from tests.support.seeded_entropy import SeededEntropy

_RUN: Final = "quality"
# From a copy of the weights to adoption: the push, the news of the version, asking for it, receiving it.
_MESSAGES: Final = 4
# Of a message, in time units; what is left of an arm's delay is spent on deltas and updates, half each.
_LATENCY: Final = 0.25
# What the syncer and its store take of an answer's time; without it an answer comes just after the step it is due at.
_SYNCER_S: Final = 0.6
# From the run's creation to the first step of all: time enough to join.
_JOINING_S: Final = 60.0
# So that a delta of any size takes the arm's delay: it travels in one call, and no message waits for room.
_WINDOW: Final = 1000
_LANE_BYTES: Final = 2**40
_STORE: Final = StoreFaults(latency_s=(0.001, 0.001))
_SETTINGS: Final = HostSettings(replica=ReplicaSettings(busy_poll_s=0.25, idle_poll_s=1.0, retry_s=0.5))
_STALL_S: Final = 60.0
_FLUSH_S: Final = 30.0
_LATE_PUSHES: Final = 3  # an earlier delta's, the flush's own, and one to spare
# Of the work that a run without a clock owes. A learner that is rounds late can't send its very last steps: its delta
# before waits for a round, and the others have left.
_LEAST_MERGED: Final = 0.97


@dataclass(frozen=True)
class Fault:
    """What is wrong with a broken learner."""

    before_step: Callable[[task.InnerTraining, int], None] | None = None  # given its training and the step's number
    token_factor: int = 1  # it reports so many times its tokens


def train_islands(arm: Islands, seed: int, fault: Fault | None = None) -> Outcome:
    """Lives through the arm and judges the weights that the run ends with; the last learner has the fault."""
    logging.getLogger("skerry").setLevel(logging.CRITICAL)
    with asyncio.Runner(loop_factory=ProcessLoop) as runner:
        return runner.run(_live(arm, seed, fault))


async def _live(arm: Islands, seed: int, fault: Fault | None) -> Outcome:
    world = _World(arm, seed, fault)
    try:
        return await world.live()
    finally:
        for process in world.processes:
            process.bury()


class _World:
    def __init__(self, arm: Islands, seed: int, fault: Fault | None) -> None:
        self.arm = arm
        self._fault = fault
        self.seed = seed
        self._event_count = 0
        self.processes: list[Process] = []
        self.policy = Policy.from_json(arm.policy_values)
        self._endpoints = [Endpoint()]
        latency_s = min(arm.delay / _MESSAGES, _LATENCY)
        self.bulk_s = max(0.0, arm.delay - _MESSAGES * latency_s - _SYNCER_S) / 2
        faults = NetworkFaults(latency_s=(latency_s, latency_s), wander=0.0)
        self.network = Network(self._endpoints, faults, random.Random(seed), window=_WINDOW)
        self.log: RunLog | None = None
        self.begin_s = 0.0  # when the learners' clocks begin
        self._ready_count = 0
        self._is_ready = asyncio.Event()

    async def live(self) -> Outcome:
        replica = ReplicaProcess(
            0, self.network, SharedStore(self._count), _STORE, seed=f"{self.seed}/replica", settings=_SETTINGS
        )
        replica.boot()
        self.processes += replica.processes
        learners = [
            _Learner(self, index, island, count=self.arm.shard_count or len(self.arm.islands))
            for index, island in enumerate(self.arm.islands)
        ]
        await learners[0].create()
        assert replica.host is not None
        opened = await replica.host.open(_RUN)
        log = self.log = opened.log
        self.begin_s = asyncio.get_running_loop().time() + _JOINING_S
        async with asyncio.TaskGroup() as tasks:
            lives = [tasks.create_task(learner.live()) for learner in learners]
            await asyncio.wait(lives)
        request = runs_pb2.CloseRunRequest(name=_RUN, run_uid=log.spec.uid)
        await self.transport("admin").ask(lambda stubs: stubs.runs.CloseRun, request, timeout_s=60.0)
        while log.state.status is not RunStatus.CLOSED:
            await log.wait_for(log.state.position + 1)
        judged = learners[0].training
        parameters = TorchParameters(judged.model)
        for name, fragment in log.state.fragments.items():
            outer = await Replayer(opened.stored, name).rebuild(fragment.version, Scratch(None))
            parameters.load(fragment.layout, parameters.from_host(outer.weights))()
        figures = _figures(log.state, learners)
        owed_count = len(learners) * self.arm.step_count
        must_merge = self._fault is None and not self.arm.is_wall_clock
        if must_merge and figures["merged_steps"] < _LEAST_MERGED * owed_count:
            raise RuntimeError(f"work was not merged. owed={owed_count}, merged={figures['merged_steps']}")
        are_alike = all(
            island == Island(batch_size=island.batch_size, data=island.data, part=island.part)
            for island in self.arm.islands
        )
        if self._fault is None and are_alike and figures["answer_steps"] not in (0, self.arm.delay):  # 0: none came
            raise RuntimeError(f"answers did not take their time. steps={figures['answer_steps']}, {self.arm}")
        return Outcome(
            {data: judged.judge(data) for data in self.arm.judged_on},
            tuple(learner.step_count for learner in learners),
            figures,
        )

    def delivered(self, learner: str) -> int:
        """Returns the inner steps of `learner` that are merged or will be, on the mean of the fragments."""
        assert self.log is not None
        return round(_accepted_steps(self.log.state, learner, {Fate.PENDING, Fate.MERGED}))

    async def everybody_is_ready(self) -> None:
        """Waits until as many learners wait here as there are."""
        self._ready_count += 1
        if self._ready_count == len(self.arm.islands):
            self._is_ready.set()
        await self._is_ready.wait()

    def transport(self, name: str, *, extra_delay: float = 0.0) -> BulkTransport:
        return BulkTransport(self.network, LearnerRecord(name, 0), self._count, self.bulk_s, extra_delay)

    def fault_of(self, index: int) -> Fault:
        """Returns the fault of a learner; a sound one has none."""
        is_last = index == len(self.arm.islands) - 1
        return self._fault if self._fault is not None and is_last else Fault()

    def _count(self) -> int:
        self._event_count += 1
        return self._event_count


class _WatchedParameters(TorchParameters):
    """A model's parameters that note how many steps lie between each copy for a delta and the answer's adoption."""

    def __init__(self, model: torch.nn.Module, step_count: Callable[[], int], answers: list[int]) -> None:
        super().__init__(model)
        self._step_count = step_count
        self._answers = answers
        self._copied: dict[str, int] = {}  # fragment -> step

    def snapshot(self, layout: FragmentLayout, out: FlatArray) -> Work:
        copy = super().snapshot(layout, out)

        def work() -> None:
            copy()
            self._copied[layout.name] = self._step_count()

        return work

    def add(self, layout: FragmentLayout, shift: FlatArray) -> Work:
        add = super().add(layout, shift)

        def work() -> None:
            add()
            if layout.name in self._copied:
                self._answers.append(self._step_count() - self._copied.pop(layout.name))

        return work


class _Learner:
    """One island: a process that trains, and after an absence another one."""

    def __init__(self, world: _World, index: int, island: Island, *, count: int) -> None:
        self.step_count = 0
        self._world = world
        self._island = island
        self._fault = world.fault_of(index)
        self._name = f"learner-{index}"
        arm = world.arm
        # Its own steps, of which it plans as many as it takes until the clock stops.
        self._horizon_steps = arm.step_count * (island.speed if arm.is_wall_clock else 1.0)
        inner = task.Inner(arm.peak_rate, self._horizon_steps, arm.optimizer, arm.rank, arm.task)
        self.waiting_s = 0.0
        self.answers: list[int] = []  # steps from each copy to adoption
        self.is_flushed = False
        self.training = task.InnerTraining(inner, seed=world.seed)
        self._sampler = task.sampler(
            island.part or index + 1,
            count,
            seed=world.seed,
            task=arm.task,
            data=island.data,
            batch_size=island.batch_size,
        )
        self._jitter = random.Random(f"{world.seed}/{index}/jitter")
        self._sessions = 0
        self._lost_count = 0  # steps that died with their process
        self._start_s = random.Random(f"{world.seed}/{index}/start").uniform(0, island.start_within)
        self._absences = sorted((*island.absent, *_deaths(island, arm.step_count, f"{world.seed}/{index}/deaths")))
        self._exchange: ExchangeLoop | None = None

    async def create(self) -> None:
        """Makes the run from this learner's weights."""
        self._exchange = self._new_exchange()
        await self._exchange.join()

    async def live(self) -> None:
        for start, end in (*self._absences, (float("inf"), float("inf"))):
            process = Process(f"{self._name}.{self._sessions}")
            self._world.processes.append(process)
            done = asyncio.Event()
            running = process.start(self._process(done))
            waiting = asyncio.create_task(done.wait())
            timeout = None if start == float("inf") else max(0.0, start - self._time())
            await asyncio.wait([waiting, running], timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            # A broken learner may notice what is wrong with it. Then it trains on alone.
            has_stopped = running.done() and isinstance(running.exception(), StopExchangingError)
            if running.done() and not (has_stopped and self._fault != Fault()):
                running.result()
            if done.is_set():
                return
            process.kill()
            for link in self._world.network.links(self._name, None):
                for call in list(link.calls):
                    call.break_off()
            if has_stopped:
                await self._world.everybody_is_ready()  # the others wait for it before they leave
                return
            self._exchange = None
            self._lost_count = self.step_count - self._world.delivered(self._name)
            self.training.forget()
            await asyncio.sleep(max(0.0, end - self._time()))

    async def _process(self, done: asyncio.Event) -> None:
        exchange = self._exchange
        if exchange is None:
            exchange = self._new_exchange()
            await exchange.join()
        running = asyncio.create_task(exchange.run())
        await exchange.wait_attached()
        await self._train(exchange)
        await self._leave(exchange)
        await running
        if exchange.stats.failure is not None:
            raise exchange.stats.failure
        done.set()

    def _new_exchange(self) -> ExchangeLoop:
        seed = f"{self._world.seed}/{self._name}/{self._sessions}"
        self._sessions += 1
        return ExchangeLoop(
            Calls(
                self._world.transport(self._name, extra_delay=self._island.extra_delay),
                Retry(RetrySettings(), random.Random(f"{seed}/jitter"), is_transient),
                stall_timeout_s=_STALL_S + self._island.extra_delay,
                lane_bytes=_LANE_BYTES,
            ),
            _WatchedParameters(self.training.model, lambda: self.step_count, self.answers),
            ExchangeSettings(
                run=_RUN,
                learner_id=self._name,
                create=True,
                policy=self._world.policy,
                fragment_count=self._world.arm.fragment_count,
            ),
            workers=InlineWorkers(),
            entropy=SeededEntropy(random.Random(f"{seed}/ids")),
            boundary=Boundary(_LoopClock(), asyncio.get_running_loop().call_soon),
        )

    async def _train(self, exchange: ExchangeLoop) -> None:
        island = self._island
        next_s = max(self._time(), self._start_s)
        while not self._is_done(next_s):
            next_s += self._jitter.uniform(1 - island.jitter, 1 + island.jitter) / island.speed
            await asyncio.sleep(max(0.0, next_s - self._time()))
            batch = self._sampler.batch(self.step_count)
            if self._fault.before_step is not None:
                self._fault.before_step(self.training, self.step_count)
            loss = self.training.step(batch, self._schedule_position(exchange))
            self.step_count += 1
            exchange.step(self._fault.token_factor * batch.token_count, loss)

    def _schedule_position(self, exchange: ExchangeLoop) -> float:
        """Returns the position in the learner's own schedule, as `skerry learn` has it."""
        step = self.step_count - self._lost_count
        return run_position(step, exchange.stats.progress, horizon_steps=self._horizon_steps)

    def _time(self) -> float:
        """Returns the time units since the learners' clocks began; negative while they join."""
        return asyncio.get_running_loop().time() - self._world.begin_s

    def _is_done(self, now_s: float) -> bool:
        arm = self._world.arm
        if arm.is_wall_clock:
            return now_s >= arm.step_count
        return self.step_count - self._lost_count >= arm.step_count

    async def _leave(self, exchange: ExchangeLoop) -> None:
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + _FLUSH_S + _LATE_PUSHES * self._island.extra_delay
        exchange.flush()
        while not exchange.is_flushed and loop.time() < deadline_s:
            exchange._boundary.work()  # noqa: SLF001 - what `serve` does, without a thread to wait in
            await asyncio.sleep(0.1)
        self.is_flushed = exchange.is_flushed
        # Who left is expected no more, and the last ones' work would count for everybody's.
        await self._world.everybody_is_ready()
        self.waiting_s = exchange.stats.waiting_s
        with suppress(SkerryError):
            await exchange.leave()


def _deaths(island: Island, step_count: int, seed: str) -> list[tuple[float, float]]:
    """Returns times of a tenth of `step_count` time units each, apart from each other, drawn by `seed`."""
    tenth = step_count / 10
    draw = random.Random(seed)
    starts = sorted(draw.uniform(0, step_count - island.deaths * tenth) for _ in range(island.deaths))
    return [(start + index * tenth, start + (index + 1) * tenth) for index, start in enumerate(starts)]


def _accepted_steps(state: RunState, learner: str, fates: Collection[Fate]) -> float:
    """Returns the inner steps of a learner's deltas of these fates, on the mean of the fragments.

    The log forgets merged deltas, but not their steps.
    """
    own = [delta for delta in state.deltas.values() if delta.item.learner == learner]
    others = sum(delta.item.step_count for delta in own if delta.fate not in fates)
    return (state.learners[learner].step_count - others) / len(state.fragments)


def _figures(state: RunState, learners: list[_Learner]) -> dict[str, float]:
    """What the log says of the exchange."""
    merged = [delta for delta in state.deltas.values() if delta.fate is Fate.MERGED]
    closes = [
        version.commit.close
        for fragment in state.fragments.values()
        for version in fragment.versions.values()
        if version.commit is not None
    ]
    quarantined = [delta for delta in state.deltas.values() if delta.fate is Fate.QUARANTINED]
    last = f"learner-{len(learners) - 1}"
    return {
        "quarantined_sound": float(sum(delta.item.learner != last for delta in quarantined)),
        "versions": float(len(closes)),
        "participation": statistics.fmean(close.participation for close in closes),
        "members": statistics.fmean(len(close.members) for close in closes if close.members),
        "staleness": statistics.fmean(delta.staleness for delta in merged),
        "deltas": float(len(state.deltas)),
        "merged": float(len(merged)),
        "merged_steps": sum(_accepted_steps(state, learner, {Fate.MERGED}) for learner in state.learners),
        "flushed": statistics.fmean(learner.is_flushed for learner in learners),
        "waiting": statistics.fmean(learner.waiting_s for learner in learners),
        "run_steps": statistics.fmean(fragment.newest.step_count for fragment in state.fragments.values()),
        "answer_steps": statistics.median([steps for learner in learners for steps in learner.answers] or [0]),
        "steps_a_delta": statistics.fmean(delta.item.step_count for delta in merged),
    }


class _LoopClock:
    def monotonic_s(self) -> float:
        """Returns virtual seconds."""
        return asyncio.get_running_loop().time()
