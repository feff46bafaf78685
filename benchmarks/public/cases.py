"""The arms of the public table, and how each arm's learning rate is tuned.

Four learners have a quarter of the text each. A learner's step is nanoGPT's: 12 windows of 64 characters. All arms have
nanoGPT's schedule, warm-up of 100 steps and AdamW. Only the rate differs. It is tuned on a seed that no result is
reported on: the best of rates a factor of two apart, of which the neighbours on either side are worse.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.quality.arms import Arm, DataParallel, Island, Job, Synchronous, islands

LENGTHS: Final[Mapping[str, tuple[int, ...]]] = {
    "0.2M": (500,),
    "0.8M": (500, 1000, 2000, 5000),
    "3M": (300,),
    "10M": (200,),
}
"""Steps of each learner, by the model's parameters."""
PUBLISHED: Final = "0.8M"
"""The size of nanoGPT's recipe for a processor."""
SEEDS: Final[Mapping[str, tuple[int, ...]]] = {
    "0.2M": (0, 1, 2, 3, 4),
    "0.8M": (0, 1, 2, 3, 4),
    "3M": (0, 1, 2),
    "10M": (0, 1, 2),
}
TUNING_SEEDS: Final = (100,)
_MOST_TUNED_STEPS: Final = 1000
_FIRST_RATE: Final = 8e-3
_NANOGPT_RATE: Final = 1e-3
_COUNT: Final = 4
_BATCH: Final = 12
_H: Final = 24
_FLOAT32: Final = {"codec": "float32", "block": 256, "vector_codec": "float32", "compressor": "none"}
_INT4: Final = {"codec": "int4", "block": 256, "vector_codec": "float32", "compressor": "zstd"}


@dataclass(frozen=True)
class Kind:
    """A way to train."""

    make: Callable[[str, str, int, float], Arm]  # of the size, the text's name, steps and peak rate
    lengths: tuple[int, ...]  # of the published size
    tuned_as: str | None = None  # the kind whose peak rate it has; None: it is tuned itself
    is_trend: bool = False  # it is trained at all sizes


def _task(size: str) -> str:
    return f"nanogpt-{size}"


def _together(count: int) -> Callable[[str, str, int, float], Arm]:
    return lambda size, text, steps, rate: DataParallel(
        count, steps, rate, batch_size=_BATCH, data=text, task=_task(size)
    )


def _synchronous(**outer: Any) -> Callable[[str, str, int, float], Arm]:
    return lambda size, text, steps, rate: Synchronous(_COUNT, steps, rate, data=text, task=_task(size), **outer)


def _decoupled(*changed: Mapping[str, Any], **settings: Any) -> Callable[[str, str, int, float], Arm]:
    """Four learners, of which the last have what `changed` says, with `settings` of the arm."""

    def make(size: str, text: str, steps: int, rate: float) -> Arm:
        each = [dict[str, Any]()] * (_COUNT - len(changed)) + [dict(values) for values in changed]
        policy = {"delta_encoding": _INT4, "update_encoding": _INT4, "quarantine_ratio": 1000.0}
        return islands(
            _COUNT,
            steps,
            rate,
            policy={**policy, **settings.get("policy", {})},
            islands=tuple(Island(batch_size=_BATCH, data=text, **values) for values in each),
            judged_on=(text,),
            task=_task(size),
            **{name: value for name, value in settings.items() if name != "policy"},
        )

    return make


ALONE: Final = "one learner"
TOGETHER: Final = "four learners' batches in one place"
SYNCHRONOUS: Final = "synchronous DiLoCo, tuned"
DECOUPLED: Final = "decoupled"
_ALL: Final = LENGTHS[PUBLISHED]
_FEW: Final = (500, 2000)

KINDS: Final[Mapping[str, Kind]] = {
    ALONE: Kind(_together(1), _ALL, is_trend=True),
    "one learner, at nanoGPT's own rate": Kind(
        lambda size, text, steps, _: _together(1)(size, text, steps, _NANOGPT_RATE), (2000,), ALONE
    ),
    TOGETHER: Kind(_together(_COUNT), _ALL, is_trend=True),
    # The rate is tuned at 1000 steps, and may be too high for 5000.
    f"{TOGETHER}, at half the rate": Kind(
        lambda size, text, steps, rate: _together(_COUNT)(size, text, steps, rate / 2), (5000,), TOGETHER
    ),
    SYNCHRONOUS: Kind(
        _synchronous(outer_rate=0.55, outer_momentum=0.8, merge="rda", ramp=3.0, settling=0.125), _ALL[:3]
    ),
    "synchronous DiLoCo, as published (0.7, 0.9)": Kind(_synchronous(outer_rate=0.7, outer_momentum=0.9), _ALL[:3]),
    DECOUPLED: Kind(_decoupled(), _ALL, is_trend=True),
    "decoupled, float32 both ways": Kind(
        _decoupled(policy={"delta_encoding": _FLOAT32, "update_encoding": _FLOAT32}), _FEW, DECOUPLED, is_trend=True
    ),
    "decoupled, plain mean": Kind(_decoupled(policy={"merge": "mean"}), _FEW, DECOUPLED),
    "decoupled, twice as often (H = 12)": Kind(
        _decoupled(policy={"inner_step_count": _H // 2}), _FEW, DECOUPLED, is_trend=True
    ),
    "decoupled, half as often (H = 48)": Kind(
        _decoupled(policy={"inner_step_count": 2 * _H}), _FEW, DECOUPLED, is_trend=True
    ),
    "decoupled, two learners die for two tenths": Kind(_decoupled({"deaths": 2}, {"deaths": 2}), _FEW, DECOUPLED),
    "decoupled, one learner three times slower": Kind(
        _decoupled({"speed": 1 / 3}, is_wall_clock=True), _FEW, DECOUPLED
    ),
    "decoupled, answers H/2 steps late": Kind(_decoupled(delay=_H / 2), _FEW, DECOUPLED, is_trend=True),
}
"""Every row of the table."""


def lengths_of(name: str, size: str) -> tuple[int, ...]:
    """Returns the steps after which a row has results; none if it is not trained at this size."""
    kind = KINDS[name]
    if size == PUBLISHED:
        return kind.lengths
    return LENGTHS[size] if kind.is_trend else ()


def tuning_steps(size: str) -> int:
    """Returns the steps of each learner for which rates are tuned."""
    return min(LENGTHS[size][-1], _MOST_TUNED_STEPS)


def tune(name: str, size: str, text: str, loss_of: Callable[[Job], float]) -> float:
    """Returns the peak rate whose loss is below that of twice and of half the rate, for a kind that is tuned."""

    def loss(rate: float) -> float:
        made = KINDS[name].make(size, text, tuning_steps(size), rate)
        return statistics.fmean(loss_of(Job(made, seed)) for seed in TUNING_SEEDS)

    rate = _FIRST_RATE
    while (better := next((near for near in (rate / 2, rate * 2) if loss(near) < loss(rate)), None)) is not None:
        rate = better
    return rate


def jobs(names: Iterable[str], size: str, lengths: Iterable[int], text: str, rates: Mapping[str, float]) -> list[Job]:
    """Returns what these rows of the table take, from the peak rate by kind that is tuned."""
    return [
        job
        for name in names
        for steps in lengths
        if steps in lengths_of(name, size)
        for job in seeds_of(name, size, text, steps, rates)
    ]


def seeds_of(name: str, size: str, text: str, steps: int, rates: Mapping[str, float]) -> list[Job]:
    """Returns the jobs of one cell of the table, a seed each."""
    made = KINDS[name].make(size, text, steps, rates[KINDS[name].tuned_as or name])
    return [Job(made, seed) for seed in SEEDS[size]]
