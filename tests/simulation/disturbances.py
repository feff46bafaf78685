"""What goes wrong in a simulated run, and when: faults as data, drawn from a seed before anything happens."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from skerry.wire.codecs import Codec
from tests.simulation.network import NetworkFaults
from tests.simulation.shared_store import StoreFaults

# Seconds of a training step: two fast learners, one 3 times slower, one 10 times.
STEP_S: Final = (0.5, 0.55, 1.5, 5.0)


class Disturbance(NamedTuple):
    """Something that happens once: a call of the director's method of that name."""

    at_s: float
    kind: str
    arguments: dict[str, Any]


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
    disturbances: list[Disturbance] = []
    for kind, expected in mix.kinds:
        count = int(expected) + (source.random() < expected % 1)
        for _ in range(count):
            at_s = source.uniform(0, duration_s)
            disturbances.append(Disturbance(at_s, kind, _KINDS[kind](source)))
    return tuple(sorted(disturbances, key=lambda disturbance: disturbance.at_s))


def _replica(source: random.Random) -> int:
    return source.randrange(REPLICA_COUNT)


def _learner(source: random.Random) -> int:
    return source.randrange(len(STEP_S))  # taken modulo the number of learners


def _is_likely(source: random.Random) -> bool:
    return source.random() < 0.7


_KINDS: Final[dict[str, Callable[[random.Random], dict[str, Any]]]] = {
    "kill_replica": lambda source: {
        "number": _replica(source),
        "down_s": source.uniform(0, 30),
        "with_reset": _is_likely(source),
    },
    "kill_replica_at_operation": lambda source: {
        "number": _replica(source),
        "down_s": source.uniform(0, 20),
        "operation_count": source.randint(1, 40),
        "before": source.random() < 0.5,
    },
    "kill_all": lambda source: {"down_s": source.uniform(0, 20)},
    "drain": lambda source: {"number": _replica(source), "down_s": source.uniform(0, 10)},
    "stop_replica": lambda source: {"number": _replica(source), "for_s": source.uniform(1, 90)},
    "kill_learner": lambda source: {
        "number": _learner(source),
        "down_s": source.uniform(0, 40),
        "with_reset": _is_likely(source),
    },
    "stop_learner": lambda source: {"number": _learner(source), "for_s": source.uniform(1, 90)},
    "replace_learner": lambda source: {"number": _learner(source), "for_s": source.uniform(5, 90)},
    "partition": lambda source: {
        "learner": _learner(source) if _is_likely(source) else None,
        "replica": _replica(source) if _is_likely(source) else None,
        "for_s": source.uniform(1, 80),
    },
    "half_open": lambda source: {"number": _learner(source)},
    "store_outage": lambda source: {
        "replica": _replica(source) if source.random() < 0.5 else None,
        "for_s": source.uniform(1, 60),
    },
    "roll_back": lambda source: {"share": source.uniform(0.2, 1.0)},
    "eject": lambda source: {"number": _learner(source), "for_s": source.uniform(1, 40)},
    "change_policy": lambda source: {"inner_step_count": source.choice((4, 6, 9, 12))},
    "poison": lambda source: {"number": _learner(source), "factor": source.choice((float("inf"), 1e4))},
}
