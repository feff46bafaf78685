"""The arms of the public table, and how each arm's learning rate is tuned.

Four learners have a quarter of the text each. A learner's step is nanoGPT's: 12 windows of 64 characters. All arms have
nanoGPT's schedule, warm-up of 100 steps and AdamW. Only the rate differs. It is tuned on a seed that no result is
reported on: the best of rates a factor of two apart, of which the neighbours on either side are worse.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.quality.arms import Arm, DataParallel, Island, Job, Synchronous, islands

TASK: Final = "nanogpt-0.8M"
LENGTHS: Final = (500, 1000, 2000, 5000)
"""Steps of each learner."""
SEEDS: Final = (0, 1, 2, 3, 4)
TUNING_SEEDS: Final = (100,)
TUNING_STEPS: Final = 1000
_FIRST_RATE: Final = 8e-3
_COUNT: Final = 4
_BATCH: Final = 12
_H: Final = 24
_FLOAT32: Final = {"codec": "float32", "block": 256, "vector_codec": "float32", "compressor": "none"}
_INT4: Final = {"codec": "int4", "block": 256, "vector_codec": "float32", "compressor": "zstd"}


@dataclass(frozen=True)
class Kind:
    """A way to train."""

    make: Callable[[str, int, float], Arm]  # of the text's name, steps and peak rate
    lengths: tuple[int, ...] = LENGTHS
    tuned_as: str | None = None  # the kind whose peak rate it has; None: it is tuned itself


def _together(count: int) -> Callable[[str, int, float], Arm]:
    return lambda text, steps, rate: DataParallel(count, steps, rate, batch_size=_BATCH, data=text, task=TASK)


def _synchronous(**outer: Any) -> Callable[[str, int, float], Arm]:
    return lambda text, steps, rate: Synchronous(_COUNT, steps, rate, data=text, task=TASK, **outer)


def _decoupled(*changed: Mapping[str, Any], **settings: Any) -> Callable[[str, int, float], Arm]:
    """Four learners, of which the last have what `changed` says, with `settings` of the arm."""

    def make(text: str, steps: int, rate: float) -> Arm:
        each = [dict[str, Any]()] * (_COUNT - len(changed)) + [dict(values) for values in changed]
        policy = {"delta_encoding": _INT4, "update_encoding": _INT4, "quarantine_ratio": 1000.0}
        return islands(
            _COUNT,
            steps,
            rate,
            policy={**policy, **settings.get("policy", {})},
            islands=tuple(Island(batch_size=_BATCH, data=text, **values) for values in each),
            judged_on=(text,),
            task=TASK,
            **{name: value for name, value in settings.items() if name != "policy"},
        )

    return make


_DECOUPLED: Final = "decoupled"
_FEW: Final = (500, 2000)
_LONG: Final = (2000,)

KINDS: Final[Mapping[str, Kind]] = {
    "one learner": Kind(_together(1)),
    "four learners' batches in one place": Kind(_together(_COUNT)),
    "synchronous DiLoCo, tuned": Kind(
        _synchronous(outer_rate=0.55, outer_momentum=0.8, merge="rda", ramp=3.0, settling=0.125), LENGTHS[:3]
    ),
    "synchronous DiLoCo, as published (0.7, 0.9)": Kind(_synchronous(outer_rate=0.7, outer_momentum=0.9), LENGTHS[:3]),
    _DECOUPLED: Kind(_decoupled()),
    "decoupled, float32 both ways": Kind(
        _decoupled(policy={"delta_encoding": _FLOAT32, "update_encoding": _FLOAT32}), _FEW, _DECOUPLED
    ),
    "decoupled, plain mean": Kind(_decoupled(policy={"merge": "mean"}), _FEW, _DECOUPLED),
    "decoupled, two learners die for two tenths": Kind(_decoupled({"deaths": 2}, {"deaths": 2}), _LONG, _DECOUPLED),
    "decoupled, one learner three times slower": Kind(
        _decoupled({"speed": 1 / 3}, is_wall_clock=True), _LONG, _DECOUPLED
    ),
    "decoupled, answers H/2 steps late": Kind(_decoupled(delay=_H / 2), _LONG, _DECOUPLED),
}
"""Every row of the table."""


def tune(name: str, text: str, loss_of: Callable[[Job], float]) -> float:
    """Returns the peak rate whose loss is below that of twice and of half the rate, for a kind that is tuned."""

    def loss(rate: float) -> float:
        return statistics.fmean(loss_of(Job(KINDS[name].make(text, TUNING_STEPS, rate), seed)) for seed in TUNING_SEEDS)

    rate = _FIRST_RATE
    while (best := min((rate, rate / 2, rate * 2), key=loss)) != rate:
        rate = best
    return rate


def jobs(names: Iterable[str], lengths: Container[int], text: str, rates: Mapping[str, float]) -> list[Job]:
    """Returns what these rows of the table take, from the peak rate by kind that is tuned."""
    return [
        Job(arm(name, text, steps, rates), seed)
        for name in names
        for steps in KINDS[name].lengths
        if steps in lengths
        for seed in SEEDS
    ]


def arm(name: str, text: str, steps: int, rates: Mapping[str, float]) -> Arm:
    """Returns the arm of a kind."""
    kind = KINDS[name]
    return kind.make(text, steps, rates[kind.tuned_as or name])
