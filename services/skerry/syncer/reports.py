"""What a learner reports of itself and what observers see of it, as plain values: membership needs no protobuf."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LearnerReport:
    """A learner's own figures; specified in `skerry/v1/types.proto`."""

    step_count: int = 0
    token_count: int = 0
    step_time_s: float = 0.0
    loss: float | None = None
    sent_bytes: int = 0
    received_bytes: int = 0
    adopted: tuple[tuple[str, int], ...] = ()  # (fragment, version)
    stall_time_s: float = 0.0


@dataclass(frozen=True)
class LearnerRecord:
    """A learner as observers see it."""

    learner: str
    region: str
    session: str
    is_live: bool
    is_participating: bool
    report: LearnerReport | None
