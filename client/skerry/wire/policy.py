"""A run's policy: how its rounds open, wait, close and merge. The creator of a run states it, and the log keeps it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, Final, Self

import msgspec
from msgspec import Meta

from skerry.wire.codecs import Codec, Encoding, check_fields
from skerry.wire.layout import check_name


class MergeRule(StrEnum):
    """How the deltas of a round become one outer gradient (`skerry.algorithm.merge`)."""

    MEAN = "mean"
    RDA = "rda"


class OuterSchedule(StrEnum):
    """How outer momentum follows the run's progress (`skerry.algorithm.outer`)."""

    CONSTANT = "constant"
    WARM_UP = "warm-up"


class OuterName(StrEnum):
    """Which outer optimizer takes the step (`skerry.algorithm.outer`)."""

    LEADING_NESTEROV = "leading-nesterov"
    NESTEROV = "nesterov"


@dataclass(frozen=True)
class OuterOptimizer:
    """The outer optimizer: SGD with Nesterov momentum, of one kind or the other."""

    name: OuterName = OuterName.LEADING_NESTEROV
    learning_rate: Annotated[float, Meta(ge=1e-9, le=4)] = 0.8
    momentum: Annotated[float, Meta(ge=0, le=0.9999)] = 0.8
    schedule: OuterSchedule = OuterSchedule.WARM_UP

    def __post_init__(self) -> None:
        """Checks every field, as `Policy` does."""
        check_fields(self)


@dataclass(frozen=True)
class Gate:
    """Which metric of which judge must not become worse; the fields are specified in message Gate."""

    judge: str = ""  # without judge or metric there is no gate
    metric: str = ""
    margin: Annotated[float, Meta(ge=0, le=1e12)] = 0.0
    window_count: Annotated[int, Meta(ge=1, le=64)] = 8
    rolls_back: bool = False
    higher_is_better: bool = False

    def __post_init__(self) -> None:
        """Checks every field, as `Policy` does."""
        check_fields(self)
        for kind in ("judge", "metric"):
            if name := getattr(self, kind):
                check_name(name, kind)


# 4 bits both ways; blocks of 256 cost an eighth of a bit for their scales, and no loss (docs/learning.md).
_DEFAULT_ENCODING: Final = Encoding(codec=Codec.INT4)


@dataclass(frozen=True)
class Policy:
    """Every setting of a run's rounds; the fields are specified in `skerry/v1/types.proto`, message Policy."""

    inner_step_count: Annotated[int, Meta(ge=1, le=1_000_000)] = 24
    delay_step_count: Annotated[int, Meta(ge=0, le=1_000_000)] | None = None
    quorum_count: Annotated[int, Meta(ge=1, le=10_000)] = 1
    grace_factor: Annotated[float, Meta(ge=0, le=0.999)] = 0.5
    outer: OuterOptimizer = field(default_factory=OuterOptimizer)
    merge: MergeRule = MergeRule.RDA
    merge_by_fragment: Mapping[str, MergeRule] = field(default_factory=dict)
    max_staleness: Annotated[int, Meta(ge=0, le=1_000_000)] = 8
    delta_encoding: Encoding = _DEFAULT_ENCODING
    update_encoding: Encoding = _DEFAULT_ENCODING
    quarantine_ratio: Annotated[float, Meta(ge=0, le=1e9)] = 1000.0
    lease_term_s: Annotated[float, Meta(ge=0.1, le=86_400)] = 15.0
    snapshot_ratio: Annotated[float, Meta(ge=0, le=1e6)] = 1.0
    planned_token_count: Annotated[int, Meta(ge=0, le=10**18)] = 0
    kept_version_count: Annotated[int, Meta(ge=1, le=1_000_000)] = 8
    kept_hours: Annotated[float, Meta(ge=0, le=1_000_000)] = 1.0
    kept_day_count: Annotated[int, Meta(ge=0, le=100_000)] = 30
    pinned_positions: tuple[Annotated[int, Meta(ge=0)], ...] = ()
    enrols_by_run: bool = False
    gate: Gate = field(default_factory=Gate)

    def __post_init__(self) -> None:
        """Checks every field.

        Raises:
            ValueError: a field is out of its range, or of another type; the message names it.
        """
        check_fields(self)
        if 0 < self.quarantine_ratio <= 1:
            raise ValueError(f"quarantine_ratio must be 0 or above 1. value={self.quarantine_ratio}")

    @property
    def tau(self) -> int:
        """Inner steps after which a learner wants the answer: `delay_step_count`, or half of H."""
        return self.inner_step_count // 2 if self.delay_step_count is None else self.delay_step_count

    @property
    def has_waiting_rounds(self) -> bool:
        """Whether rounds wait for other learners. If they do not, an answer to RoundOpened would come too late."""
        return self.quorum_count > 1 or self.grace_factor > 0

    def merge_rule(self, fragment: str) -> MergeRule:
        """Returns the merge rule of `fragment`."""
        return self.merge_by_fragment.get(fragment, self.merge)

    def to_json(self) -> dict[str, Any]:
        """Returns the policy as JSON values, every field."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any], *, is_text: bool = False) -> Self:
        """Returns the policy that `to_json` gave; fields that are absent take their defaults.

        With `is_text` numbers and flags may be strings.

        Raises:
            ValueError: an unknown field, one out of range, or values that are no policy's.
        """
        if not isinstance(values, Mapping):
            raise ValueError(f"a policy is a JSON object. values={str(values)[:80]}")  # noqa: TRY004 - a file may hold anything
        unknown = values.keys() - {entry.name for entry in dataclasses.fields(cls)}
        if unknown:
            raise ValueError(f"policy field is not known. fields={sorted(unknown)}")
        return msgspec.convert(dict(values), cls, strict=not is_text)
