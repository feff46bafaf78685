"""The acceptance table: which arms are compared with which, and what must come out.

Every arm has the default policy unless its case says otherwise, and the learning rate that is best for its kind.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from benchmarks.quality.arms import MEASURED_ENCODING, Arm, DataParallel, Island, Islands, Job, Synchronous, islands
from benchmarks.quality.task import CPP, PYTHON

ALONE_RATE: Final = 1.2e-2
TOGETHER_RATE: Final = 2.4e-2
ISLANDS_RATE: Final = 1.2e-2
"""The best of a grid from 6e-3 to 3.4e-2; that of islands is flat from 8.5e-3 to 1.7e-2."""

STEPS: Final = 600
"""Of comparisons that name no length: 25 rounds, noisier than 62, at two fifths of the cost."""

_FLOAT32: Final = {"codec": "float32", "block": 128, "vector_codec": "float32", "compressor": "none"}


def _encoding(codec: str) -> dict[str, Any]:
    """Returns an encoding as policies have it: vectors of block codecs as by default."""
    if codec == "float32":
        return _FLOAT32
    return {**MEASURED_ENCODING, "codec": codec}


_MOST: Final = tuple(range(20))
_MANY: Final = tuple(range(10))
_HALF: Final = tuple(range(5))
_SOME: Final = (0, 1, 2)


@dataclass(frozen=True)
class Comparison:
    """One row: by how many percent is the subject's loss above the reference's."""

    case: str
    subject: Arm
    reference: Arm
    reference_name: str
    bound: float  # percent, at most
    interval: float | None = None  # percent: the half width of the 95 % interval must be below
    seeds: tuple[int, ...] = _SOME


@dataclass(frozen=True)
class Gap:
    """One row: how much of the gap between alone and data-parallel is closed, and how far above data-parallel."""

    case: str
    subject: Arm
    alone: Arm
    together: Mapping[int, DataParallel]  # by its steps: how many does it need for the same loss
    share: float  # at least
    bound: float  # percent over data-parallel, at most
    seeds: tuple[int, ...] = _SOME


@dataclass(frozen=True)
class Cell:
    """One row: the defaults against the best of the other settings that were tried for the cell, and against alone.

    The best is chosen on the first half of the seeds, and held against the defaults on the others.
    """

    case: str
    subject: Arm
    settings: Mapping[str, Arm]
    alone: Arm
    bound: float  # percent over the best, at most
    seeds: tuple[int, ...] = _SOME


@dataclass(frozen=True)
class Plain:
    """One row without a bound: losses on each kind of text, by arm."""

    case: str
    arms: Mapping[str, Arm]
    seeds: tuple[int, ...] = _SOME


Case = Comparison | Gap | Cell | Plain


def jobs_of(case: Case) -> Iterable[Job]:
    """Yields every job that the case takes."""
    arms: list[Arm] = []
    match case:
        case Comparison():
            arms = [case.subject, case.reference]
        case Gap():
            arms = [case.subject, case.alone, *case.together.values()]
        case Cell():
            arms = [case.subject, case.alone, *case.settings.values()]
        case Plain():
            arms = list(case.arms.values())
    for arm in arms:
        for seed in case.seeds:
            yield Job(arm, seed)


def default(learner_count: int, step_count: int = STEPS, **settings: Any) -> Islands:
    """Islands as a newcomer gets them."""
    return islands(learner_count, step_count, ISLANDS_RATE, **settings)


def alone(step_count: int = STEPS) -> DataParallel:
    """One learner by itself."""
    return DataParallel(1, step_count, ALONE_RATE)


def together(learner_count: int, step_count: int = STEPS) -> DataParallel:
    """All in one place."""
    return DataParallel(learner_count, step_count, TOGETHER_RATE)


def outer_policy(name: str, rate: float, momentum: float, schedule: str, merge: str = "mean") -> dict[str, Any]:
    """Returns a policy of these outer settings."""
    return {
        "merge": merge,
        "outer": {"name": name, "learning_rate": rate, "momentum": momentum, "schedule": schedule},
    }


SETTINGS: Final[Mapping[str, Mapping[str, Any]]] = {
    "mean, no momentum": outer_policy("nesterov", 1.0, 0.0, "constant"),
    "mean, constant 0.8/0.5": outer_policy("nesterov", 0.8, 0.5, "constant"),
    "mean, warm-up to 0.9": outer_policy("nesterov", 0.8, 0.9, "warm-up"),
    "mean, leading, warm-up to 0.8": outer_policy("leading-nesterov", 0.8, 0.8, "warm-up"),
    "RDA, warm-up to 0.8": outer_policy("nesterov", 0.8, 0.8, "warm-up", "rda"),
}
"""What the defaults are held against in each cell: the ends of what was worth trying."""

_LONG: Final[Mapping[str, Mapping[str, Any]]] = {
    name: SETTINGS[name] for name in ("mean, warm-up to 0.9", "mean, leading, warm-up to 0.8", "RDA, warm-up to 0.8")
}
"""Of long and large cells, where the settings without momentum are far behind."""

_SYNCHRONOUS_BEST: Final = Synchronous(4, STEPS, ISLANDS_RATE, 0.55, 0.8, merge="rda", ramp=3.0, settling=0.125)

_RUSHES: Final = {"quorum_count": 1, "grace_factor": 0.0}


def speeds(*speed: float, jitter: float = 0.0, **settings: Any) -> Arm:
    """Islands of these speeds, all stopped by the same clock."""
    made = tuple(Island(speed=float(one), jitter=jitter) for one in speed)
    return islands(len(made), STEPS, ISLANDS_RATE, islands=made, is_wall_clock=True, **settings)


_UNEQUAL: Final = (1.0, 1.0, 0.82, 0.82)
# A learner of speed 0.82 takes 29.3 time units for 24 steps, its answer 2: 19 rounds fit into 600.
_WAITING: Final = replace(_SYNCHRONOUS_BEST, step_count=19 * 24)

_GAP: Final = Gap(
    "M = 4, 1500 steps, H = 24: gap to data-parallel",
    default(4, 1500),
    alone(1500),
    {count: together(4, count) for count in (800, 1000, 1250, 1500)},
    share=0.75,
    bound=6.0,
    seeds=_MANY,
)
_LARGE_BLOCKS: Final = {**MEASURED_ENCODING, "block": 256}
_AS_IT_IS: Final = default(4, policy={"delta_encoding": _LARGE_BLOCKS, "update_encoding": _LARGE_BLOCKS})
_FOUR_BITS: Final = Comparison(
    "4 bits both ways",
    _AS_IT_IS,
    default(4, policy={"delta_encoding": _FLOAT32, "update_encoding": _FLOAT32}),
    "float32 both ways",
    0.5,
    1.0,
    _MANY,
)
_LATE, _LATE_LONG = (
    Comparison(
        f"answer adopted H/2 steps late, {count} steps",
        default(4, count, delay=12.0),
        default(4, count),
        "2 steps late",
        2.0,
        None,
        _MANY,
    )
    for count in (STEPS, 1500)
)

_ONE_LATE: Final = default(3, islands=(Island(extra_delay=14.0), Island(), Island()))
_VERY_LATE: Final = (
    *(
        Comparison(
            f"answer adopted {delay:g} steps late, 600 steps",
            default(4, delay=delay),
            alone(),
            "the single-learner baseline",
            0.0,
            None,
            seeds,
        )
        for delay, seeds in ((16.0, _MANY), (24.0, _HALF))
    ),
    Comparison(
        "one of three learners 14 steps late", _ONE_LATE, alone(), "the single-learner baseline", 0.0, None, _HALF
    ),
    Comparison("one of three learners 14 steps late", _ONE_LATE, default(3), "three in time", 3.0, None, _HALF),
)


def one_contributor(**policy: Any) -> Islands:
    """Four equal islands whose clocks are shifted at random, and whose rounds wait for nobody."""
    return default(4, policy={**_RUSHES, **policy}, islands=(Island(start_within=24.0),) * 4)


_ONE_SLOW: Final = {
    times: Comparison(
        f"a learner {times} times slower added to two",
        speeds(1, 1, 1 / times),
        speeds(1, 1, shard_count=3),
        "without it, same data",
        0.5,
        None,
        _MOST,
    )
    for times in (3, 10, 50)
}
_COMPARISONS: Final = (
    Comparison("M = 4, decoupled", _AS_IT_IS, _SYNCHRONOUS_BEST, "synchronous DiLoCo, tuned", 0.5, 1.0, _MOST),
    Comparison("blocks of 256 elements", _AS_IT_IS, default(4), "blocks of 128", 0.5, 1.0, _MOST),
    _FOUR_BITS,
    _LATE,
    _LATE_LONG,
    *_VERY_LATE,
    Comparison("rounds with one contributor", one_contributor(), default(4), "joint rounds", 4.0, None, _MANY),
    Comparison(
        "speeds 1, 1, 1/2, 1/3",
        speeds(1, 1, 1 / 2, 1 / 3),
        speeds(1, 1, shard_count=4),
        "without the slow ones, same data",
        0.5,
        None,
        _MOST,
    ),
    *_ONE_SLOW.values(),
    Comparison(
        "each learner dead for two random tenths",
        default(4, islands=(Island(deaths=2),) * 4),
        default(4),
        "none dead",
        1.0,
        None,
        _MOST,
    ),
    *(
        Comparison(f"speeds 1, 1, 0.82, 0.82, jitter 10 %: K = 1 {name}", subject, reference, against, 0.0, None, _MANY)
        for name, subject, reference, against in (
            ("with grace", speeds(*_UNEQUAL, jitter=0.1), _WAITING, "K = M, learners wait"),
            # With grace it makes the same rounds as K = M.
            (
                "without",
                speeds(*_UNEQUAL, jitter=0.1, policy=_RUSHES),
                speeds(*_UNEQUAL, jitter=0.1),
                "K = 1 with grace",
            ),
        )
    ),
)


def _cell(
    learner_count: int, step_count: int, settings: Mapping[str, Mapping[str, Any]], seeds: tuple[int, ...]
) -> Cell:
    return Cell(
        f"M = {learner_count}, {step_count} steps",
        default(learner_count, step_count),
        {name: default(learner_count, step_count, policy=policy) for name, policy in settings.items()},
        alone(step_count),
        2.0,
        seeds,
    )


_CELLS: Final = (
    *(_cell(count, 300, SETTINGS, _MANY) for count in (2, 4)),
    _cell(8, 300, SETTINGS, _HALF),
    _cell(16, 300, SETTINGS, _SOME),
    _cell(2, 1500, _LONG, _MANY),
    _cell(4, 1500, _LONG, _HALF),
    _cell(8, 1500, _LONG, _SOME),
    _cell(4, 5000, _LONG, (0,)),
)

_OTHER_DATA: Final = Plain(
    "one learner of three trains on C++ headers",
    {
        "two on Python, one on C++": default(
            3, islands=(Island(), Island(), Island(data=CPP)), judged_on=(PYTHON, CPP)
        ),
        "three on Python": default(3, judged_on=(PYTHON, CPP)),
        "one island, on C++": default(1, islands=(Island(data=CPP),), judged_on=(PYTHON, CPP)),
    },
)
_SETTLING: Final = tuple(
    Comparison(
        f"momentum settles, {count} steps",
        default(4, count),
        default(4, count, policy={"planned_token_count": 0}),
        "no planned length",
        0.0,
        None,
        _MANY,
    )
    for count in (STEPS, 1500)
)
_MUON: Final = Plain(
    "Muon as the inner optimizer, all at 1.2e-2",
    {
        "alone, AdamW": alone(),
        "alone, Muon": replace(alone(), optimizer="muon"),
        "islands, AdamW": default(4),
        "islands, Muon": default(4, optimizer="muon"),
        "data-parallel, AdamW": DataParallel(4, STEPS, ISLANDS_RATE),
        "data-parallel, Muon": DataParallel(4, STEPS, ISLANDS_RATE, optimizer="muon"),
    },
)
_H: Final = Plain(
    "inner steps between contributions",
    {f"H = {count}": default(4, policy={"inner_step_count": count}) for count in (6, 12, 24, 48, 96)},
)
_P: Final = Plain("fragments", {f"P = {count}": default(4, fragment_count=count) for count in (1, 4, 8)})
_CODEC: Final = Plain(
    "codec both ways",
    {"int4 (default)": default(4)}
    | {
        codec: default(4, policy={"delta_encoding": _encoding(codec), "update_encoding": _encoding(codec)})
        for codec in ("int8", "float32")
    },
)

TABLE: Final[tuple[Case, ...]] = (
    _COMPARISONS[0],
    _GAP,
    *_CELLS,
    *_COMPARISONS[1:],
    _OTHER_DATA,
    *_SETTLING,
    _MUON,
    _H,
    _P,
    _CODEC,
)
"""Every row of the acceptance table."""

SHORT: Final[tuple[Case, ...]] = tuple(
    replace(case, seeds=(0,)) for case in (_FOUR_BITS, _LATE, _ONE_SLOW[10], _cell(2, 300, _LONG, (0,)))
)
"""A look in some minutes: one seed, which proves nothing but that it runs and where it stands."""
