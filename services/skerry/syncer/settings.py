"""What a syncer may spend on a run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ReplicaSettings:
    """How one replica spends its time and memory on a run."""

    busy_poll_s: float = 0.05  # between looks for others' entries while a round is open
    idle_poll_s: float = 1.0  # at most, while none is
    retry_s: float = 0.5  # after the store failed
    longest_retry_s: float = 4.0  # after a merge failed again and again
    stream_limit_bytes: int = 2**20  # of events that a follower has not taken
