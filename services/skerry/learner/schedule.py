"""The learning rate as a function of how far the run is."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class LearningRateSchedule:
    """A linear warm-up, then half a cosine down to a share of the peak.

    `horizon_steps` is the position at which the rate reaches its floor; it stays there afterwards.
    """

    peak: float
    warmup_steps: int
    horizon_steps: int
    floor_share: float = 0.1

    def rate(self, position: float) -> float:
        """The learning rate at `position`, in inner steps from the run's start; below zero counts as zero."""
        position = max(position, 0.0)
        if position < self.warmup_steps:
            return self.peak * (position + 1.0) / (self.warmup_steps + 1.0)
        span = max(self.horizon_steps - self.warmup_steps, 1)
        done = min((position - self.warmup_steps) / span, 1.0)
        cosine = 0.5 * (1.0 + math.cos(math.pi * done))
        return self.peak * (self.floor_share + (1.0 - self.floor_share) * cosine)


def run_position(local_step: int, run_progress: float | None) -> float:
    """Where the run stands, in inner steps, as one learner should see it.

    The run's progress lags the fastest learner by what is not merged yet, and leads one that is slow, came late or
    lost its checkpoint. Taking the larger of the two keeps those from training a nearly finished model at the rate of
    a new one, and lets the fastest learner reach the schedule's floor when it has done its steps.
    """
    return float(local_step) if run_progress is None else max(float(local_step), run_progress)
