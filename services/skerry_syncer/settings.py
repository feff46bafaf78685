"""What a syncer may spend on a run."""

from __future__ import annotations

from dataclasses import dataclass

from skerry_syncer.store.log.checkpoints import CHECKPOINT_EVERY


@dataclass(frozen=True)
class ReplicaSettings:
    """How one replica spends its time and memory on a run."""

    busy_poll_s: float = 0.05  # between looks for others' entries, at least
    waiting_poll_s: float = 2.0  # at most, while a round is open
    idle_poll_s: float = 30.0  # at most, while none is
    idle_advice_s: float = 120.0  # between two times that leases are shared, at most
    retry_s: float = 0.5  # after the store failed
    longest_retry_s: float = 4.0  # after a merge failed again and again
    checkpoint_every: int = CHECKPOINT_EVERY  # entries of the log
    collection_look_s: float = 60.0  # between looks whether a collection is due, which cost no request
    stream_limit_bytes: int = 2**20  # of events that a follower has not taken
