"""One run of a store: its log, its blobs and its spec."""

from __future__ import annotations

from skerry.runtime.clock import Clock
from skerry.runtime.identifiers import Entropy
from skerry.runtime.workers import Workers
from skerry_syncer.store.log.entries import RunSpec
from skerry_syncer.store.log.run_log import RunLog
from skerry_syncer.store.log.state import RunState
from skerry_syncer.store.objects.interface import Objects
from skerry_syncer.store.versions.blobs import Blobs


class Run:
    """A run as one replica reads and writes it. A process must have one object per run."""

    def __init__(
        self,
        objects: Objects,
        spec: RunSpec,
        *,
        clock: Clock,
        entropy: Entropy,
        workers: Workers,
        writer: str,
        known: tuple[int, str] | None = None,
        state: RunState | None = None,
    ) -> None:
        """Takes what `RunLog` takes, and workers that hash."""
        self.spec = spec
        self.log = RunLog(objects, spec, clock=clock, entropy=entropy, writer=writer, known=known, state=state)
        condemned = self.log.state.condemned
        self.blobs = Blobs(objects, self.log.prefix, entropy, workers=workers, condemned=condemned, look=self.log.tail)

    @property
    def state(self) -> RunState:
        """The fold of the log."""
        return self.log.state
