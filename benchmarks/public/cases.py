"""The arms of the public table, and the grid on which each arm's learning rate is tuned.

Four learners have a quarter of the text each. A learner's step is nanoGPT's: 12 windows of 64 characters. All arms have
nanoGPT's schedule, warm-up of 100 steps and AdamW. Only the rate differs; `--tune` tries rates on seeds that no result
is reported on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.quality.arms import Arm, DataParallel, Island, Job, Synchronous, islands

TASK: Final = "nanogpt-0.8M"
LENGTHS: Final = (500, 1000, 2000, 5000)
"""Steps of each learner."""
SEEDS: Final = (0, 1, 2, 3, 4)
TUNING_SEEDS: Final = (100,)
TUNING_STEPS: Final = 1000
_COUNT: Final = 4
_BATCH: Final = 12
_H: Final = 24
_FLOAT32: Final = {"codec": "float32", "block": 256, "vector_codec": "float32", "compressor": "none"}
_INT4: Final = {"codec": "int4", "block": 256, "vector_codec": "float32", "compressor": "zstd"}


@dataclass(frozen=True)
class Kind:
    """A way to train."""

    make: Callable[[str, int, float], Arm]  # of the text's name, steps and peak rate
    rate: float  # peak; `--tune` shows which rate of the grid is best
    grid: tuple[float, ...] = ()  # of rates that `--tune` tries; none: it has the rate of another kind
    lengths: tuple[int, ...] = LENGTHS

    def arm(self, text: str, steps: int, rate: float | None = None) -> Arm:
        """Returns its arm at the kind's own peak rate, or at `rate`."""
        return self.make(text, steps, rate or self.rate)


def _together(count: int) -> Callable[[str, int, float], Arm]:
    return lambda text, steps, rate: DataParallel(count, steps, rate, batch_size=_BATCH, data=text, task=TASK)


def _synchronous(**outer: Any) -> Callable[[str, int, float], Arm]:
    return lambda text, steps, rate: Synchronous(_COUNT, steps, rate, data=text, task=TASK, **outer)


def _decoupled(*changed: Mapping[str, Any], **settings: Any) -> Callable[[str, int, float], Arm]:
    """Four learners, of which the last have what `changed` says, with `settings` of the arm."""

    def make(text: str, steps: int, rate: float) -> Arm:
        each = [dict[str, Any]()] * (_COUNT - len(changed)) + [dict(values) for values in changed]
        policy = {"delta_encoding": _INT4, "update_encoding": _INT4, "quarantine_ratio": 10.0}
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


_RATES: Final = (1e-3, 2e-3, 4e-3, 8e-3, 16e-3)
_ISLANDS_RATE: Final = 4e-3
_LONG: Final = (2000,)

KINDS: Final[Mapping[str, Kind]] = {
    "one learner": Kind(_together(1), 4e-3, _RATES),
    "four learners' batches in one place": Kind(_together(_COUNT), 8e-3, _RATES),
    "synchronous DiLoCo, tuned": Kind(
        _synchronous(outer_rate=0.55, outer_momentum=0.8, merge="rda", ramp=3.0, settling=0.125), 4e-3, _RATES
    ),
    "synchronous DiLoCo, as published (0.7, 0.9)": Kind(_synchronous(outer_rate=0.7, outer_momentum=0.9), 4e-3, _RATES),
    "decoupled": Kind(_decoupled(), _ISLANDS_RATE, _RATES),
    "decoupled, float32 both ways": Kind(
        _decoupled(policy={"delta_encoding": _FLOAT32, "update_encoding": _FLOAT32}), _ISLANDS_RATE
    ),
    "decoupled, plain mean": Kind(_decoupled(policy={"merge": "mean"}), _ISLANDS_RATE),
    "decoupled, two learners die for two tenths": Kind(
        _decoupled({"deaths": 2}, {"deaths": 2}), _ISLANDS_RATE, lengths=_LONG
    ),
    "decoupled, one learner three times slower": Kind(
        _decoupled({"speed": 1 / 3}, is_wall_clock=True), _ISLANDS_RATE, lengths=_LONG
    ),
    "decoupled, answers H/2 steps late": Kind(_decoupled(delay=_H / 2), _ISLANDS_RATE, lengths=_LONG),
}
"""Every row of the table."""


def jobs(text: str) -> list[Job]:
    """Returns what the table takes, the shortest runs first."""
    return [
        Job(kind.arm(text, steps), seed)
        for steps in LENGTHS
        for seed in SEEDS
        for kind in KINDS.values()
        if steps in kind.lengths
    ]


def tuning_jobs(text: str) -> list[Job]:
    """Returns what the choice of the rates takes."""
    return [
        Job(kind.arm(text, TUNING_STEPS, rate), seed)
        for kind in KINDS.values()
        for rate in kind.grid
        for seed in TUNING_SEEDS
    ]
