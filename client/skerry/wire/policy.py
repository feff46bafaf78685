"""A run's policy: how its rounds open, wait, close and merge. The creator of a run states it, and the log keeps it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, Self

import msgspec

from skerry.wire.codecs import Codec, Encoding


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


def _ranged(default: Any, low: float, high: float) -> Any:
    """Declares a field whose value is from `low` to `high`, both included."""
    return field(default=default, metadata={"range": (low, high)})


def _check(values: Any, prefix: str = "") -> None:
    """Checks every field: those that declare a range by it, the others by the type of their default.

    Raises:
        ValueError: a field is out of its range, or of another type; the message names it.
    """
    for entry in dataclasses.fields(values):
        name, value = f"{prefix}{entry.name}", getattr(values, entry.name)
        if "range" not in entry.metadata:
            has_factory = entry.default is dataclasses.MISSING
            kind: Any = entry.default_factory if has_factory else type(entry.default)
            if not isinstance(value, kind):
                raise ValueError(f"policy field must be a {kind.__name__}. field={name}, value={value!r}")
            continue
        if value is entry.default is None:
            continue
        low, high = entry.metadata["range"]
        if isinstance(value, bool) or not hasattr(value, "__float__"):
            raise ValueError(f"policy field must be a number. field={name}, value={value!r}")
        if name.endswith("_count") and not hasattr(value, "__index__"):
            raise ValueError(f"policy field must be a whole number. field={name}, value={value}")
        if not low <= value <= high:
            raise ValueError(f"policy field is out of range. field={name}, value={value}, low={low}, high={high}")


@dataclass(frozen=True)
class OuterOptimizer:
    """The outer optimizer: SGD with Nesterov momentum, of one kind or the other."""

    name: OuterName = OuterName.LEADING_NESTEROV
    learning_rate: float = _ranged(0.8, 1e-9, 4)
    momentum: float = _ranged(0.8, 0, 0.9999)
    schedule: OuterSchedule = OuterSchedule.WARM_UP

    def __post_init__(self) -> None:
        """Checks every field, as `Policy` does."""
        _check(self, "outer.")


# 4 bits both ways; blocks of 256 cost an eighth of a bit for their scales, and no loss (docs/learning.md).
_DEFAULT_ENCODING: Final = Encoding(codec=Codec.INT4)


@dataclass(frozen=True)
class Policy:
    """Every setting of a run's rounds; the fields are specified in `skerry/v1/types.proto`, message Policy."""

    inner_step_count: int = _ranged(24, 1, 1_000_000)
    delay_step_count: int | None = _ranged(None, 0, 1_000_000)
    quorum_count: int = _ranged(1, 1, 10_000)
    grace_factor: float = _ranged(0.5, 0, 0.999)
    outer: OuterOptimizer = field(default_factory=OuterOptimizer)
    merge: MergeRule = MergeRule.RDA
    merge_by_fragment: Mapping[str, MergeRule] = field(default_factory=dict)
    max_staleness: int = _ranged(8, 0, 1_000_000)
    weight_cap: float = _ranged(2.0, 1, 1_000)
    delta_encoding: Encoding = _DEFAULT_ENCODING
    update_encoding: Encoding = _DEFAULT_ENCODING
    quarantine_ratio: float = _ranged(1000.0, 0, 1e9)
    lease_term_s: float = _ranged(15.0, 0.1, 86_400)
    snapshot_ratio: float = _ranged(1.0, 0, 1e6)
    planned_step_count: int = _ranged(0, 0, 10**12)
    kept_version_count: int = _ranged(8, 1, 1_000_000)
    kept_hours: float = _ranged(1.0, 0, 1_000_000)
    kept_day_count: int = _ranged(30, 0, 100_000)
    pinned_positions: tuple[int, ...] = ()
    enrols_by_run: bool = False

    def __post_init__(self) -> None:
        """Checks every field.

        Raises:
            ValueError: a field is out of its range, or of another type; the message names it.
        """
        _check(self)
        if not all(isinstance(rule, MergeRule) for rule in self.merge_by_fragment.values()):
            raise ValueError(
                f"policy field must have merge rules. field=merge_by_fragment, value={self.merge_by_fragment}"
            )
        if not all(hasattr(position, "__index__") and position >= 0 for position in self.pinned_positions):
            raise ValueError(
                f"policy field must have log positions. field=pinned_positions, value={self.pinned_positions}"
            )
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
