"""Replicas on one store in virtual time, each with faults of its own."""

import random
from collections import Counter
from collections.abc import Callable, Coroutine
from inspect import Signature, signature
from typing import Any

from skerry.runtime.clock import Clock, SystemClock
from skerry.runtime.identifiers import Entropy, SystemEntropy
from skerry.runtime.workers import InlineWorkers
from skerry.wire.layout import FragmentLayout, TensorSpec
from skerry.wire.policy import Policy
from skerry_syncer.store.log.entries import PolicyItem, RunSpec
from skerry_syncer.store.log.run_log import RunLog
from skerry_syncer.store.objects.interface import Objects
from skerry_syncer.store.store import Store
from tests.simulation.virtual_time import VirtualClock, run_virtual
from tests.support.dict_objects import DictObjects
from tests.support.faulty_objects import NO_FAULT, Fault, FaultyObjects, LateWrites
from tests.support.seeded_entropy import SeededEntropy

UID, OTHER_UID = "a" * 32, "b" * 32
LAYOUT = FragmentLayout("body", (TensorSpec("w", (4,)),))
SPEC = RunSpec("run", UID, (LAYOUT,), {"w": "float32"}, 0.0)


def store_on(objects: Objects, *, clock: Clock | None = None, entropy: Entropy | None = None) -> Store:
    """Returns a store as a process of its own sees it, by default with real time and ids."""
    clock, entropy = clock or SystemClock(), entropy or SystemEntropy()
    return Store(objects, clock=clock, entropy=entropy, workers=InlineWorkers(), writer="test")


class Bench:
    """One shared store and any number of replicas on it, each with its own faults; operations are counted."""

    def __init__(self) -> None:
        self.shared = DictObjects()
        self.late = LateWrites()
        self.clock = VirtualClock()
        self.entropy = SeededEntropy(random.Random(0))
        self.operations: Counter[str] = Counter()

    def store(self, faults: Callable[[str, str], Fault] = lambda _operation, _name: NO_FAULT) -> Store:
        def schedule(operation: str, name: str) -> Fault:
            self.operations[operation] += 1
            return faults(operation, name)

        objects = FaultyObjects(self.shared, schedule, clock=self.clock, late=self.late)
        return store_on(objects, clock=self.clock, entropy=self.entropy)

    async def log(self, faults: Callable[[str, str], Fault] = lambda _operation, _name: NO_FAULT) -> RunLog:
        """Returns the run's log, as a replica of its own sees it."""
        return (await self.store(faults).create_draft(SPEC)).log

    def policy(self) -> PolicyItem:
        return PolicyItem(self.entropy.hex_id(), Policy())


def on_virtual_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Runs a test with a bench, and its own parameters, on a fresh virtual-time loop."""

    def run(**parameters: Any) -> None:
        async def main() -> None:
            await test(Bench(), **parameters)

        run_virtual(main)

    run.__name__ = test.__name__
    _bench, *others = signature(test).parameters.values()
    run.__signature__ = Signature(others)  # type: ignore[attr-defined]  # what pytest reads
    return run
