"""The storm's schedule: what goes wrong with real processes, and when; drawn from a seed before anything happens."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from tests.simulation.disturbances import (
    REPLICA_COUNT,
    Disturbance,
    DrainReplica,
    HalfOpen,
    KillAllReplicas,
    KillLearner,
    KillReplica,
    Partition,
    ReplaceLearner,
    StopLearner,
    StopReplica,
    StoreOutage,
)

LEARNER_COUNT: Final = 6
# Nothing happens to this one itself: its steps must take what they take in a calm run.
UNTOUCHED: Final = LEARNER_COUNT - 1
# Seconds of a training step; one learner is three times slower.
STEP_S: Final = (0.08, 0.09, 0.1, 0.12, 0.3, 0.1)
_GAP_S: Final = 2.5


@dataclass(frozen=True)
class DrainLearner(Disturbance):
    """SIGTERM: it sends what is unsent, leaves, and comes back."""

    learner: int
    down_s: float


@dataclass(frozen=True)
class StoreMode(Disturbance):
    """One replica's way to the store is slow or flaky, or the store is full for it."""

    replica: int
    mode: str
    for_s: float


@dataclass(frozen=True)
class DiskFull(Disturbance):
    """The store has no space left, for everybody."""

    for_s: float


@dataclass(frozen=True)
class Throttle(Disturbance):
    """A learner's links carry few bytes a second, and each of them late."""

    learner: int
    bytes_per_s: float
    delay_s: float
    for_s: float


@dataclass(frozen=True)
class DropPackets(Disturbance):
    """The kernel drops this share of the packets to a learner's links; all of them: a peer that vanished."""

    learner: int
    share: float
    for_s: float


@dataclass(frozen=True)
class StepClock(Disturbance):
    """A process's calendar clock jumps; of a replica where `learner` is None."""

    learner: int | None
    replica: int | None
    offset_s: float


def draw(seed: int, duration_s: float) -> tuple[Disturbance, ...]:
    """Returns the disturbances of one storm in order of time: every kind once, in any order, then any of them."""
    source = random.Random(f"{seed}/storm")
    kinds = list(_KINDS)
    source.shuffle(kinds)
    found: list[Disturbance] = []
    at_s = 1.0
    gap_s = min(_GAP_S, duration_s / (len(kinds) + 2))
    while at_s < duration_s:
        kind = kinds.pop() if kinds else source.choice(list(_KINDS))
        found.append(_KINDS[kind](at_s, source))
        at_s += gap_s * source.uniform(0.5, 1.5)
    return tuple(found)


def _replica(source: random.Random) -> int:
    return source.randrange(REPLICA_COUNT)


def _learner(source: random.Random) -> int:
    return source.randrange(UNTOUCHED)


def _brief_s(source: random.Random) -> float:
    """Returns seconds: mostly a few, sometimes longer than a lease, a term or a round."""
    return min(25.0, 1.0 + source.expovariate(1 / 4))


_Draw = Callable[[float, random.Random], Disturbance]
_KINDS: Final[dict[str, _Draw]] = {
    "kill_replica": lambda at_s, r: KillReplica(at_s, _replica(r), _brief_s(r)),
    "kill_all": lambda at_s, r: KillAllReplicas(at_s, r.uniform(0, 4)),
    "drain_replica": lambda at_s, r: DrainReplica(at_s, _replica(r), _brief_s(r)),
    "stop_replica": lambda at_s, r: StopReplica(at_s, _replica(r), _brief_s(r)),
    "kill_learner": lambda at_s, r: KillLearner(at_s, _learner(r), r.uniform(0, 5)),
    "stop_learner": lambda at_s, r: StopLearner(at_s, _learner(r), _brief_s(r)),
    "replace_learner": lambda at_s, r: ReplaceLearner(at_s, _learner(r), _brief_s(r)),
    "drain_learner": lambda at_s, r: DrainLearner(at_s, _learner(r), r.uniform(0, 5)),
    "cut": lambda at_s, r: Partition(at_s, _learner(r), r.choice([None, *range(REPLICA_COUNT)]), _brief_s(r)),
    "half_open": lambda at_s, r: HalfOpen(at_s, _learner(r)),
    "throttle": lambda at_s, r: Throttle(at_s, _learner(r), r.choice((1e3, 1e4)), r.choice((0.0, 0.15)), _brief_s(r)),
    "drop_packets": lambda at_s, r: DropPackets(at_s, _learner(r), r.choice((0.01, 0.1)), _brief_s(r)),
    "vanish": lambda at_s, r: DropPackets(at_s, _learner(r), 1.0, _brief_s(r)),
    "store_outage": lambda at_s, r: StoreOutage(at_s, r.choice([None, *range(REPLICA_COUNT)]), _brief_s(r)),
    "store_slow": lambda at_s, r: StoreMode(at_s, _replica(r), "slow", _brief_s(r)),
    "store_flaky": lambda at_s, r: StoreMode(at_s, _replica(r), "flaky", _brief_s(r)),
    "store_full": lambda at_s, r: StoreMode(at_s, _replica(r), "full", _brief_s(r)),
    "disk_full": lambda at_s, r: DiskFull(at_s, _brief_s(r)),
    "step_replica_clock": lambda at_s, r: StepClock(at_s, None, _replica(r), r.uniform(-20_000, 20_000)),
    "step_learner_clock": lambda at_s, r: StepClock(at_s, _learner(r), None, r.uniform(-20_000, 20_000)),
}
