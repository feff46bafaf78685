"""One run of a store: its log, its blobs and its spec."""

from __future__ import annotations

from skerry.runtime.workers import Workers
from skerry_syncer.store.log.run_log import RunLog
from skerry_syncer.store.log.state import RunState
from skerry_syncer.store.versions.blobs import Blobs


class Run:
    """A run as one replica reads and writes it. A process must have one object per run."""

    def __init__(self, log: RunLog, workers: Workers) -> None:
        """Takes the run's log, and workers for what is done with its blobs."""
        self.log = log
        self.workers = workers
        self.spec = log.spec
        condemned = log.state.condemned
        self.blobs = Blobs(log.objects, log.prefix, log.entropy, workers=workers, condemned=condemned, look=log.tail)

    @property
    def state(self) -> RunState:
        """The fold of the log."""
        return self.log.state
