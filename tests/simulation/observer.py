"""Reads a simulated run from the store itself, past all faults: what is in the log, whatever the replicas believe."""

from __future__ import annotations

import random

from skerry.runtime.workers import InlineWorkers
from skerry_syncer.store.objects.interface import Objects
from skerry_syncer.store.store import Store
from skerry_syncer.store.versions.run import Run
from tests.simulation.learner_process import RUN
from tests.simulation.virtual_time import VirtualClock
from tests.support.seeded_entropy import SeededEntropy


async def open_run(objects: Objects) -> Run:
    """Returns the run, its log folded to its end. Call `log.tail` to follow it.

    Raises:
        RunNotFoundError: nobody has created the run yet.
        StoreError: the log can't be read.
    """
    store = Store(
        objects,
        clock=VirtualClock(),
        entropy=SeededEntropy(random.Random(0)),
        workers=InlineWorkers(),
        writer="observer",
    )
    return await store.open_run(RUN, await store.resolve(RUN))
