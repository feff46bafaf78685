"""What is simulated: learners, their chips and links, and what goes wrong when.

A spot market gives a region capacity for a while and takes it away for a while. Both times are log-normal, with median
and sigma fitted to the mean and the median of 1,878 intervals of the availability of one V100 in nine zones of AWS over
45 days of 2023. Quartiles of the fit are within 0.3 hours of the measured ones. All of a region's capacity goes at
once: of interruptions of one kind of instance in one zone 92 % are within three minutes (arXiv 2604.16457).

Source: https://github.com/skypilot-org/spot-traces, availability/1-node/aws-02-15-2023, of "Can't Be Late" (NSDI 2024).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Final

from skerry.wire.policy import Policy

YEAR_S: Final = 365.25 * 86_400
# Fitted to the table of goodput of Decoupled DiLoCo: for how long a chip's failure stops a job that goes on without the
# chip's slice, and one that waits until it is replaced.
ELASTIC_LOSS_S: Final = 20.5
RIGID_LOSS_S: Final = 75.0
# The chips of a pod of TPU7x (https://docs.cloud.google.com/tpu/docs/tpu7x), the largest slice.
SLICE_CHIPS: Final = 9216.0
SYNCER: Final = "syncer"
STORE: Final = "store"
# Hours: median and sigma of the time for which a region has capacity, and of the time for which it has none.
_SPOT_UP: Final = (0.54, 1.89)
_SPOT_DOWN: Final = (0.49, 1.61)


@dataclass(frozen=True)
class Region:
    """Learners that are alike and are lost together."""

    name: str
    step_s: float = 1.0
    count: float = 1
    chip_count: float = 0.0  # of each learner; without chips nothing fails
    bandwidth_bits_per_s: float | None = None  # of each learner's link, each way
    jitter: float = 0.0  # standard deviation of its step time from one round to the next, as a share
    failure_loss_s: float = ELASTIC_LOSS_S  # for which a chip's failure stops its learner
    slice_chip_count: float = 0.0  # that are away after a failure, for
    repair_s: float = RIGID_LOSS_S
    chip_mtbf_s: float = YEAR_S
    join_s: float = 0.0
    leave_s: float = math.inf

    @property
    def learners(self) -> list[str]:
        """The names of its learners."""
        return [self.name] if self.count == 1 else [f"{self.name}-{index + 1}" for index in range(int(self.count))]


@dataclass(frozen=True)
class Outage:
    """A time for which a region, every syncer or the store is away."""

    place: str  # a region's name, SYNCER or STORE
    start_s: float
    duration_s: float
    is_cut: bool = False  # a region's learners train on, and neither send nor hear anything

    @property
    def end_s(self) -> float:
        """When it is over."""
        return self.start_s + self.duration_s


@dataclass(frozen=True)
class Scenario:
    """Everything that a history follows from."""

    regions: tuple[Region, ...]
    duration_s: float
    policy: Policy = field(default_factory=Policy)
    fragment_count: int = 2
    parameters: float = 0.0  # 0: transfers and merges take no time
    outages: tuple[Outage, ...] = ()
    seed: int = 0


def spot_outages(region: str, duration_s: float, seed: int) -> Iterator[Outage]:
    """Yields the times for which a spot market takes a region's capacity away."""
    source = Random(f"{seed}/{region}/spot")
    now_s = 0.0
    while True:
        now_s += _lognormal_s(source, *_SPOT_UP)
        if now_s >= duration_s:
            return
        outage = Outage(region, now_s, _lognormal_s(source, *_SPOT_DOWN))
        yield outage
        now_s = outage.end_s


def _lognormal_s(source: Random, median_h: float, sigma: float) -> float:
    return 3600 * source.lognormvariate(math.log(median_h), sigma)
