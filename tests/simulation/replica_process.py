"""A syncer replica as processes of the simulation: real store, host and servicers; a new process after each death."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Final

from skerry.runtime.workers import InlineWorkers
from skerry_syncer.rpc.capabilities import CapabilitiesServicer
from skerry_syncer.rpc.exchange import ExchangeServicer
from skerry_syncer.rpc.runs import RunsServicer
from skerry_syncer.run.host import HostSettings, RunHost
from skerry_syncer.settings import ReplicaSettings
from skerry_syncer.store.store import Store
from skerry_syncer.store.versions.scratch import Scratch
from tests.simulation.network import Endpoint, Method, Network
from tests.simulation.processes import OUTSIDE, Process
from tests.simulation.shared_store import CALM_STORE, SharedStore, StoreFaults, StoreLink
from tests.simulation.virtual_time import VirtualClock
from tests.support.seeded_entropy import SeededEntropy

_DRAIN_GRACE_S: Final = 20.0
# Slower than in production, as the simulation's steps are slower than real ones.
_SETTINGS: Final = HostSettings(
    in_flight_bytes=512,
    replica=ReplicaSettings(busy_poll_s=0.25, idle_poll_s=1.0, retry_s=0.5, checkpoint_every=48),
)


@dataclass(eq=False)
class ReplicaProcess:
    """One replica: its endpoint on the network, and the process that is behind it now; `boot` starts one."""

    index: int
    network: Network
    store: SharedStore
    faults: StoreFaults
    seed: str
    settings: HostSettings
    host: RunHost | None = None
    link: StoreLink | None = None
    processes: list[Process] = field(default_factory=list)

    @property
    def process(self) -> Process | None:
        """The process that is there, alive or dead."""
        return self.processes[-1] if self.processes else None

    @property
    def is_alive(self) -> bool:
        """Whether a process is there and was not killed."""
        return self.process is not None and self.process.is_alive

    def boot(self) -> None:
        """Starts a new process."""
        generation = len(self.processes)
        self.host = None
        process = Process(f"replica-{self.index}.{generation}")
        self.processes.append(process)
        source = random.Random(f"{self.seed}/{generation}")
        self.link = StoreLink(self.store, process, self.faults, random.Random(f"{self.seed}/{generation}/store"))
        self.link.on_kill = lambda: self._died(with_reset=True)
        endpoint = self.network.endpoints[self.index]
        endpoint.process, endpoint.is_accepting = process, False
        process.start(self._serve(process, self.link, endpoint, source))

    async def _serve(self, process: Process, link: StoreLink, endpoint: Endpoint, source: random.Random) -> None:
        clock_error_s = random.Random(f"{self.seed}/clock").uniform(-20_000, 20_000)
        clock = VirtualClock(unix_offset_s=1.7e9 + clock_error_s)
        entropy = SeededEntropy(source)
        store = Store(link, clock=clock, entropy=entropy, workers=InlineWorkers(), writer=process.name)
        self.host = host = RunHost(store, scratch=Scratch(None), settings=self.settings)
        async with host.serving():
            endpoint.methods = _methods(host)
            endpoint.is_accepting = True
            await asyncio.Event().wait()

    def calm_store(self) -> None:
        """Ends all faults of its way to the store, for this process and those after it."""
        self.faults = CALM_STORE
        if self.link is not None:
            self.link.calm()

    def kill(self, *, with_reset: bool) -> None:
        """Kills the process; its host, if it lives on, resets the connections."""
        if self.process is not None and self.process.is_alive:
            self.process.kill()
            self._died(with_reset=with_reset)

    def kill_after(self, operation_count: int, *, before: bool) -> None:
        """Kills the process at its n-th store operation from now."""
        if self.link is not None and self.is_alive:
            self.link.kill_after(operation_count, before=before)

    def drain(self) -> None:
        """Sends SIGTERM: the replica takes no new calls, hands over, and ends."""
        process, host = self.process, self.host
        if process is None or host is None or not process.is_running:
            return
        self.network.endpoints[self.index].is_accepting = False

        async def leave() -> None:
            await host.drain(_DRAIN_GRACE_S)
            asyncio.get_running_loop().call_soon(lambda: self._ended(process), context=OUTSIDE)

        process.start(leave())

    def _ended(self, process: Process) -> None:
        if process.is_alive:
            process.kill()
            self._died(with_reset=True)

    def _died(self, *, with_reset: bool) -> None:
        self.network.lose(self.index, with_reset=with_reset)


def replica_settings(*, collects: bool) -> HostSettings:
    """Returns the settings of replicas in a simulation."""
    look_s = 7.0 if collects else math.inf
    return replace(_SETTINGS, replica=replace(_SETTINGS.replica, collection_look_s=look_s))


def _methods(host: RunHost) -> dict[str, Method]:
    runs, exchange, capabilities = RunsServicer(host), ExchangeServicer(host), CapabilitiesServicer()
    unary: list[Callable[[Any, Any], Any]] = [
        runs.CreateRun,
        runs.CommitRun,
        runs.GetRun,
        runs.SetPolicy,
        runs.SetEjection,
        runs.RollBack,
        runs.CloseRun,
        exchange.QueryPush,
        capabilities.GetCapabilities,
    ]
    return {
        **{method.__name__: Method(method) for method in unary},
        "PushDelta": Method(exchange.PushDelta, takes_stream=True),
        "PullFragment": Method(exchange.PullFragment, gives_stream=True),
        "Attach": Method(exchange.Attach, takes_stream=True, gives_stream=True),
    }
