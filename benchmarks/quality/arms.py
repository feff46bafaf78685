"""Arms: everything that one training run of the benchmark depends on, as a value that names its result."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from benchmarks.quality.task import BYTES, PYTHON, task_of


@dataclass(frozen=True)
class DataParallel:
    """One model, every step on the batches of `learner_count` learners together; with 1, the baseline."""

    learner_count: int
    step_count: int
    peak_rate: float
    optimizer: str = "adamw"
    batch_size: int = 8
    shard_count: int | None = None  # parts that the data are cut into, of which each has one; None: as many as learners
    part: int = 1  # of these, the one that the first learner trains on; the others train on those after it
    data: str = PYTHON
    rank: int = 0  # of the adapters that are trained; 0: the whole model is trained
    task: str = BYTES
    judged_on: tuple[str, ...] = ()  # none: what it trains on


@dataclass(frozen=True)
class Synchronous:
    """DiLoCo as published: every `inner_step_count` steps all wait, plain mean, Nesterov, float32, whole model."""

    learner_count: int
    step_count: int
    peak_rate: float
    outer_rate: float
    outer_momentum: float
    inner_step_count: int = 24
    merge: str = "mean"
    ramp: float = 0.0  # k of momentum_n = min(momentum, n / (n + k)) in round n
    settling: float = 0.0  # the last share of the run, over which momentum falls to 0
    data: str = PYTHON
    task: str = BYTES


@dataclass(frozen=True)
class Island:
    """What sets a learner apart from the others."""

    speed: float = 1.0  # steps a time unit
    jitter: float = 0.0  # each step's time varies by up to this share, either way
    batch_size: int = 8
    data: str = PYTHON
    part: int | None = None  # of the data, from 1; None: that of its place among the islands
    start_within: float = 0.0  # time units from 0 in which it begins, at a time that the seed draws
    extra_delay: float = 0.0  # time units that each of its deltas is on its way longer than the others'
    absent: tuple[tuple[float, float], ...] = ()  # (from, to), in time units, dead between
    deaths: int = 0  # so many tenths of the run it is dead, at times that the seed draws


@dataclass(frozen=True)
class Islands:
    """Skerry itself. A time unit is a step of a learner of speed 1; `policy` holds what differs from the default."""

    step_count: int  # of the learning rate's schedule; a learner of speed 1 takes as many
    peak_rate: float
    islands: tuple[Island, ...]
    delay: float = 2.0  # time units, at least 1, from a copy of the weights to the adoption of the version it is in
    is_wall_clock: bool = False  # all stop when `step_count` time units are over, however many steps each has taken
    policy: str = "{}"  # JSON
    fragment_count: int | None = None  # None: as many as the client plans
    optimizer: str = "adamw"
    judged_on: tuple[str, ...] = (PYTHON,)
    shard_count: int | None = None  # parts that the data are cut into, of which each has one; None: as many as islands
    rank: int = 0  # of the adapters that are trained; 0: the whole model is trained
    task: str = BYTES

    @property
    def policy_values(self) -> dict[str, Any]:
        """What differs from the default policy: blocks, the run's length, which learners know, and `policy`."""
        return {
            "delta_encoding": MEASURED_ENCODING,
            "update_encoding": MEASURED_ENCODING,
            "quarantine_ratio": MEASURED_QUARANTINE_RATIO,
            "planned_token_count": self.planned_tokens,
            **json.loads(self.policy),
        }

    @property
    def planned_tokens(self) -> int:
        """How many tokens all islands train, by their mean times where the seed draws them."""
        context = task_of(self.task).config.context
        return round(sum(context * island.batch_size * self._steps(island) for island in self.islands))

    def _steps(self, island: Island) -> float:
        """Returns how many steps an island takes, without those that die with its process."""
        end = self.step_count
        if not self.is_wall_clock:
            return end
        absent = sum(min(until, end) - min(since, end) for since, until in island.absent) + island.deaths * end / 10
        return island.speed * (end - island.start_within / 2 - absent)


# Most of the table is from before the default's blocks had 256 elements, which have a row of their own.
MEASURED_ENCODING: Final = {"codec": "int4", "block": 128, "vector_codec": "float32", "compressor": "zstd"}
# Of the table, in which nothing is quarantined by this ratio or by the default's.
MEASURED_QUARANTINE_RATIO: Final = 30.0

Arm: TypeAlias = DataParallel | Synchronous | Islands


def islands(learner_count: int, step_count: int, peak_rate: float, **settings: Any) -> Islands:
    """Equal islands, with `settings` of the arm; a `policy` is given as a mapping."""
    policy = json.dumps(settings.pop("policy", {}), sort_keys=True)
    given = settings.pop("islands", (Island(),) * learner_count)
    return Islands(step_count=step_count, peak_rate=peak_rate, islands=given, policy=policy, **settings)


@dataclass(frozen=True)
class Job:
    """One arm under one seed, which decides initial weights, data order and every random time."""

    arm: Arm
    seed: int


@dataclass(frozen=True)
class Outcome:
    """What one job measured."""

    losses: dict[str, float]  # nats a byte on held-out text, by kind of text
    step_counts: tuple[int, ...]  # by learner
    figures: dict[str, float] = field(default_factory=dict)  # of the exchange
    wall_s: float = 0.0
