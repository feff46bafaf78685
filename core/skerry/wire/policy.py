"""A run's policy: how its rounds open, wait, close and merge. Creators state it, the log keeps it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, NamedTuple, Self

from skerry.wire.codecs import Codec, Compressor, Encoding


class MergeRule(StrEnum):
    """How the deltas of a round become one outer gradient (algorithm: `skerry.syncer.merge`)."""

    MEAN = "mean"
    RDA = "rda"


class OuterSchedule(StrEnum):
    """How outer learning rate and momentum follow the number of a fragment's rounds."""

    CONSTANT = "constant"
    RAMP = "ramp"
    WARM_UP = "warm-up"


# Number n at which momentum has come to a half, and the inner steps from one number to the next (docs/design/0007).
_HALF_WAY: Final = 3.0
_STEPS_A_NUMBER: Final = 24.0
# The length of a whole round's mean direction, as a rule (of four learners: 0.85 at first, 0.62 after 600 steps): under
# RDA, which makes up for it, the rate is as much lower. A lone learner's is 1: its steps are as much shorter.
TYPICAL_AGREEMENT: Final = 0.6875
# Of a run whose length is planned, the last part, over which momentum settles to nothing.
_SETTLING: Final = 0.125


class OuterName(StrEnum):
    """Which outer optimizer takes the step (algorithms: `skerry.algorithm.outer`)."""

    LEADING_NESTEROV = "leading-nesterov"
    NESTEROV = "nesterov"
    DELAYED_NESTEROV = "delayed-nesterov"


class OuterRates(NamedTuple):
    """What the outer optimizer works with in one round."""

    learning_rate: float
    momentum: float


@dataclass(frozen=True)
class OuterOptimizer:
    """The outer optimizer: SGD with Nesterov momentum, of one kind or the other.

    Source: Decoupled DiLoCo (arXiv 2604.21428); rates and ramp are this project's own measurements.
    """

    name: OuterName = OuterName.LEADING_NESTEROV
    learning_rate: float = 0.8
    momentum: float = 0.8
    schedule: OuterSchedule = OuterSchedule.WARM_UP

    def rates(self, steps_done: float, rule: MergeRule, *, run_done: float) -> OuterRates:
        """Returns the rates of a fragment's next round.

        With n = 1 + steps_done / 24, momentum is mu_n = min(mu, n / (n + 3)): early deltas are large and soon out of
        date. How soon is a matter of steps, so that n counts them and not rounds, whatever H is. At a warm-up the rate
        stays, lower under RDA; at a ramp it falls to a half: lr_n = lr (1 - mu_n / (2 mu)). Over the last eighth of a
        planned run momentum falls linearly to 0: it keeps what late deltas disagree in moving, and nothing would be
        left to average it. Constant rates stay what they are.

        Args:
            steps_done: inner steps of the run that are behind the fragment since its momentum began.
            rule: what merges the fragment.
            run_done: of the steps that are planned for the run, the share that is behind the fragment; 0 where no
                length is planned.
        """
        if self.schedule is OuterSchedule.CONSTANT:
            return OuterRates(self.learning_rate, self.momentum)
        number = 1 + steps_done / _STEPS_A_NUMBER
        momentum = min(self.momentum, number / (number + _HALF_WAY))
        if self.schedule is OuterSchedule.WARM_UP:
            share = TYPICAL_AGREEMENT if rule is MergeRule.RDA else 1.0
        else:
            share = 1 - momentum / (2 * self.momentum) if self.momentum else 1.0
        return OuterRates(self.learning_rate * share, momentum * min(1.0, max(0.0, 1 - run_done) / _SETTLING))


# 4 bits both ways; blocks of 128 cost a quarter of a bit for their scales.
_DEFAULT_ENCODING: Final = Encoding(
    codec=Codec.INT4, block=128, vector_codec=Codec.BFLOAT16, compressor=Compressor.ZSTD
)


@dataclass(frozen=True)
class Policy:
    """Every setting of a run's rounds; the fields are specified in `skerry/v1/types.proto`, message Policy."""

    inner_step_count: int = 24
    delay_step_count: int | None = None
    quorum_count: int = 1
    grace_factor: float = 0.5
    outer: OuterOptimizer = field(default_factory=OuterOptimizer)
    merge: MergeRule = MergeRule.RDA
    merge_by_fragment: Mapping[str, MergeRule] = field(default_factory=dict)
    staleness_exponent: float = 0.5
    max_staleness: int = 8
    weight_cap: float = 2.0
    delta_encoding: Encoding = _DEFAULT_ENCODING
    update_encoding: Encoding = _DEFAULT_ENCODING
    quarantine_ratio: float = 30.0
    lease_term_s: float = 15.0
    snapshot_ratio: float = 1.0
    planned_step_count: int = 0

    def __post_init__(self) -> None:
        """Checks every range.

        Raises:
            ValueError: a field is out of its range; the message names it.
        """
        ranges: tuple[tuple[str, float, float, float], ...] = (
            ("inner_step_count", self.inner_step_count, 1, 1_000_000),
            ("delay_step_count", self.tau, 0, 1_000_000),
            ("quorum_count", self.quorum_count, 1, 10_000),
            ("grace_factor", self.grace_factor, 0, 0.999),
            ("outer.learning_rate", self.outer.learning_rate, 1e-9, 4),
            ("outer.momentum", self.outer.momentum, 0, 0.9999),
            ("staleness_exponent", self.staleness_exponent, 0, 16),
            ("max_staleness", self.max_staleness, 0, 1_000_000),
            ("weight_cap", self.weight_cap, 1, 1_000),
            ("quarantine_ratio", self.quarantine_ratio, 0, 1e9),
            ("lease_term_s", self.lease_term_s, 0.1, 86_400),
            ("snapshot_ratio", self.snapshot_ratio, 0, 1e6),
            ("planned_step_count", self.planned_step_count, 0, 10**12),
        )
        for name, value, low, high in ranges:
            if name.endswith("_count") and not hasattr(value, "__index__"):
                raise ValueError(f"policy field must be a whole number. field={name}, value={value}")
            if not low <= value <= high:
                raise ValueError(f"policy field is out of range. field={name}, value={value}, low={low}, high={high}")
        if 0 < self.quarantine_ratio <= 1:
            raise ValueError(f"quarantine_ratio must be 0 or above 1. value={self.quarantine_ratio}")

    @property
    def tau(self) -> int:
        """Inner steps after which a learner wants the answer: `delay_step_count`, or half of H."""
        return self.inner_step_count // 2 if self.delay_step_count is None else self.delay_step_count

    @property
    def has_waiting_rounds(self) -> bool:
        """Whether a round waits for others, so that to answer its opening is of use; else an answer comes too late."""
        return self.quorum_count > 1 or self.grace_factor > 0

    def merge_rule(self, fragment: str) -> MergeRule:
        """Returns the merge rule of `fragment`."""
        return self.merge_by_fragment.get(fragment, self.merge)

    def to_json(self) -> dict[str, Any]:
        """Returns the policy as JSON values: every field, but a planned length only where there is one."""
        values = dataclasses.asdict(self)
        if not self.planned_step_count:
            del values["planned_step_count"]  # so that programs that don't know it read such a run
        return values

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Returns the policy that `to_json` gave; fields that are absent take their defaults.

        Raises:
            ValueError: an unknown field, or one out of range.
        """
        given = dict(values)
        unknown = given.keys() - {entry.name for entry in dataclasses.fields(cls)}
        if unknown:
            raise ValueError(f"policy field is not known. fields={sorted(unknown)}")
        if "outer" in given:
            outer = dict(given["outer"])
            outer["name"] = outer_name(outer.get("name", OuterName.LEADING_NESTEROV))
            outer["schedule"] = OuterSchedule(outer.get("schedule", OuterSchedule.WARM_UP))
            given["outer"] = OuterOptimizer(**outer)
        if "merge" in given:
            given["merge"] = MergeRule(given["merge"])
        if "merge_by_fragment" in given:
            given["merge_by_fragment"] = {name: MergeRule(rule) for name, rule in given["merge_by_fragment"].items()}
        for name in ("delta_encoding", "update_encoding"):
            if name in given:
                given[name] = encoding_from_json(given[name])
        return cls(**given)


def outer_name(name: str) -> OuterName:
    """Returns the outer optimizer of that name.

    Raises:
        ValueError: there is none; the message says which there are.
    """
    if name not in set(OuterName):
        raise ValueError(f"outer optimizer is not known. name={name!r}, known={[str(known) for known in OuterName]}")
    return OuterName(name)


def encoding_from_json(values: Mapping[str, Any]) -> Encoding:
    """Returns the encoding whose `dataclasses.asdict` was `values`.

    Raises:
        ValueError: an unknown codec or compressor.
    """
    given = dict(values)
    given["codec"] = Codec(given["codec"])
    given["vector_codec"] = Codec(given["vector_codec"])
    given["compressor"] = Compressor(given["compressor"])
    return Encoding(**given)
