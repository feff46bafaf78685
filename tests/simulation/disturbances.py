"""What goes wrong in a simulated run, and when: faults as data, drawn from a seed before anything happens."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from skerry.wire.codecs import Codec
from tests.simulation.network import NetworkFaults
from tests.simulation.shared_store import StoreFaults

# Seconds of a training step: two fast learners, one 3 times slower, one 10 times.
STEP_S: Final = (0.5, 0.55, 1.5, 5.0)


@dataclass(frozen=True)
class Disturbance:
    """Something that happens once; the subclasses say what."""

    at_s: float


@dataclass(frozen=True)
class KillReplica(Disturbance):
    """SIGKILL; after some store operations where `operation_count` says so, else at once. Back after `down_s`."""

    replica: int
    down_s: float
    with_reset: bool = True  # False: the host is gone too, and nobody resets connections
    operation_count: int = 0
    before: bool = False  # whether the last operation is not even sent


@dataclass(frozen=True)
class KillAllReplicas(Disturbance):
    """SIGKILL to all at once."""

    down_s: float


@dataclass(frozen=True)
class DrainReplica(Disturbance):
    """SIGTERM."""

    replica: int
    down_s: float


@dataclass(frozen=True)
class StopReplica(Disturbance):
    """SIGSTOP, and SIGCONT after `for_s`."""

    replica: int
    for_s: float


@dataclass(frozen=True)
class KillLearner(Disturbance):
    """SIGKILL; a new process of the same id comes after `down_s`."""

    learner: int
    down_s: float
    with_reset: bool = True


@dataclass(frozen=True)
class StopLearner(Disturbance):
    """SIGSTOP, and SIGCONT after `for_s`."""

    learner: int
    for_s: float


@dataclass(frozen=True)
class ReplaceLearner(Disturbance):
    """SIGSTOP; a new process takes its id; SIGCONT wakes the old one `for_s` later."""

    learner: int
    for_s: float


@dataclass(frozen=True)
class Partition(Disturbance):
    """No way between a learner and a replica; None means all of them."""

    learner: int | None
    replica: int | None
    for_s: float


@dataclass(frozen=True)
class HalfOpen(Disturbance):
    """A learner's connections become half-open: nothing arrives any more, and neither end is told."""

    learner: int


@dataclass(frozen=True)
class StoreOutage(Disturbance):
    """The store fails every operation; of one replica, or of all."""

    replica: int | None
    for_s: float


@dataclass(frozen=True)
class RollBackRun(Disturbance):
    """An operator rolls the run back, to this share of its log's length."""

    share: float


@dataclass(frozen=True)
class ChangePolicy(Disturbance):
    """An operator changes H."""

    inner_step_count: int


@dataclass(frozen=True)
class PoisonLearner(Disturbance):
    """A learner's weights are multiplied: by infinity, or by so much that its delta is an outlier."""

    learner: int
    factor: float


@dataclass(frozen=True)
class Mix:
    """How many disturbances of each kind a history has, and what store and network do all the time."""

    name: str
    kinds: tuple[tuple[str, float], ...] = ()  # (kind, expected count)
    store: StoreFaults = field(default_factory=StoreFaults)
    network: NetworkFaults = field(default_factory=NetworkFaults)
    delta_codec: Codec = Codec.INT4
    lane_bytes: int = 200  # less than most parts take together, so that transfers go over several connections
    quorum_count: int = 1
    snapshot_ratio: float = 1.0
    closes_under_fire: bool = False
    step_s: tuple[float, ...] = STEP_S
    kept_version_count: int | None = None  # None: nothing is collected, unless the store says that it is full


REPLICA_COUNT: Final = 3


def draw(mix: Mix, source: random.Random, duration_s: float) -> tuple[Disturbance, ...]:
    """Returns the disturbances of one run, in order of time."""
    found: list[Disturbance] = []
    for kind, expected in mix.kinds:
        count = int(expected) + (source.random() < expected % 1)
        found += [_KINDS[kind](source.uniform(0, duration_s), source) for _ in range(count)]
    return tuple(sorted(found, key=lambda one: (one.at_s, repr(one))))


def _replica(source: random.Random) -> int:
    return source.randrange(REPLICA_COUNT)


def _learner(source: random.Random) -> int:
    return source.randrange(len(STEP_S))  # taken modulo the number of learners


def _is_likely(source: random.Random) -> bool:
    return source.random() < 0.7


_KINDS: Final[dict[str, Callable[[float, random.Random], Disturbance]]] = {
    "kill_replica": lambda at_s, source: KillReplica(
        at_s, _replica(source), source.uniform(0, 30), with_reset=_is_likely(source)
    ),
    "kill_replica_at_operation": lambda at_s, source: KillReplica(
        at_s,
        _replica(source),
        source.uniform(0, 20),
        operation_count=source.randint(1, 40),
        before=source.random() < 0.5,
    ),
    "kill_all": lambda at_s, source: KillAllReplicas(at_s, source.uniform(0, 20)),
    "drain": lambda at_s, source: DrainReplica(at_s, _replica(source), source.uniform(0, 10)),
    "stop_replica": lambda at_s, source: StopReplica(at_s, _replica(source), source.uniform(1, 90)),
    "kill_learner": lambda at_s, source: KillLearner(
        at_s, _learner(source), source.uniform(0, 40), with_reset=_is_likely(source)
    ),
    "stop_learner": lambda at_s, source: StopLearner(at_s, _learner(source), source.uniform(1, 90)),
    "replace_learner": lambda at_s, source: ReplaceLearner(at_s, _learner(source), source.uniform(5, 90)),
    "partition": lambda at_s, source: Partition(
        at_s,
        _learner(source) if _is_likely(source) else None,
        _replica(source) if _is_likely(source) else None,
        source.uniform(1, 80),
    ),
    "half_open": lambda at_s, source: HalfOpen(at_s, _learner(source)),
    "store_outage": lambda at_s, source: StoreOutage(
        at_s, _replica(source) if source.random() < 0.5 else None, source.uniform(1, 60)
    ),
    "roll_back": lambda at_s, source: RollBackRun(at_s, source.uniform(0.2, 1.0)),
    "change_policy": lambda at_s, source: ChangePolicy(at_s, source.choice((4, 6, 9, 12))),
    "poison": lambda at_s, source: PoisonLearner(at_s, _learner(source), source.choice((float("inf"), 1e4))),
}
