"""The learning rate as a function of the run's progress."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class LearningRateSchedule:
    """A linear warm-up, then half a cosine down to `floor_share` of the peak.

    The rate reaches its floor at position `horizon_steps` and stays there.
    """

    peak: float
    warmup_steps: int
    horizon_steps: int
    floor_share: float = 0.1

    def rate(self, position: float) -> float:
        """The learning rate at `position`, in inner steps since the run's start; a negative position counts as 0."""
        position = max(position, 0.0)
        if position < self.warmup_steps:
            return self.peak * (position + 1.0) / (self.warmup_steps + 1.0)
        span = max(self.horizon_steps - self.warmup_steps, 1)
        done = min((position - self.warmup_steps) / span, 1.0)
        cosine = 0.5 * (1.0 + math.cos(math.pi * done))
        return self.peak * (self.floor_share + (1.0 - self.floor_share) * cosine)


def run_position(local_step: int, run_progress: float, *, horizon_steps: float, planned_step_count: int) -> float:
    """The position in a learner's schedule, in its inner steps: the larger of its own step and the run's progress.

    Learners of different speed take different numbers of steps in one run, so each has a horizon of its own, and the
    run's progress counts as a share of `planned_step_count`; where that is 0, in steps. A learner that is slow, joined
    late or lost its checkpoint is behind the run; its own step would train a nearly finished model at the rate of a new
    one. The fastest learner is ahead of the run by its unmerged steps, and reaches the floor with its last step.
    """
    scale = horizon_steps / planned_step_count if planned_step_count else 1.0
    return max(float(local_step), run_progress * scale)
