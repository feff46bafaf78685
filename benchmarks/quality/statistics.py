"""Paired differences and their intervals: seeds are few, so that Student's t has to say how little they tell."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

# Two-sided 95 % quantiles of Student's t by degrees of freedom, from 1.
_T95: Final = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045),
)


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds and what it may be off by."""

    mean: float
    spread: float | None  # standard deviation over seeds; None of one seed
    half_width: float | None  # of the 95 % interval; None of one seed
    samples: tuple[float, ...]

    @property
    def interval(self) -> tuple[float, float]:
        """The least and the most that the mean may be; the mean itself of one seed."""
        half_width = self.half_width or 0.0
        return self.mean - half_width, self.mean + half_width

    def is_at_most(self, bound: float) -> bool | None:
        """Whether the whole interval is at or below the bound; None of one seed, which can't say."""
        return None if self.half_width is None else self.interval[1] <= bound


def estimate(samples: Sequence[float]) -> Estimate:
    """Returns the mean of `samples`, their standard deviation, and the half width of the mean's 95 % interval.

    Raises:
        ValueError: there are none, or more than thirty.
    """
    count = len(samples)
    if not 1 <= count <= len(_T95) + 1:
        raise ValueError(f"an estimate takes one to {len(_T95) + 1} samples. count={count}")
    if count == 1:
        return Estimate(samples[0], None, None, tuple(samples))
    spread = statistics.stdev(samples)
    return Estimate(statistics.fmean(samples), spread, _T95[count - 2] * spread / math.sqrt(count), tuple(samples))


def percent_over(losses: Sequence[float], references: Sequence[float]) -> Estimate:
    """Returns by how many percent `losses` are above `references`, paired by seed; negative is better."""
    return estimate([100 * (loss / reference - 1) for loss, reference in zip(losses, references, strict=True)])


def share_of_gap(losses: Sequence[float], alone: Sequence[float], together: Sequence[float]) -> Estimate:
    """Returns (alone - islands) / (alone - data-parallel), paired by seed: 0 is alone, 1 is as good as one place."""
    return estimate([(a - x) / (a - d) for x, a, d in zip(losses, alone, together, strict=True)])
