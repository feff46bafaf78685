"""The learning rate as a function of the run's progress."""

from __future__ import annotations

import math
from typing import Final

_FLOOR_SHARE: Final = 0.1


def learning_rate(position: float, *, peak: float, warmup_steps: int, horizon_steps: float) -> float:
    """Returns the rate at `position`, in inner steps since the run's start: linear warm-up, then half a cosine.

    It reaches its floor, a tenth of the peak, at position `horizon_steps` and stays there.
    """
    if position < warmup_steps:
        return peak * (position + 1.0) / (warmup_steps + 1.0)
    done = min((position - warmup_steps) / max(horizon_steps - warmup_steps, 1), 1.0)
    cosine = 0.5 * (1.0 + math.cos(math.pi * done))
    return peak * (_FLOOR_SHARE + (1.0 - _FLOOR_SHARE) * cosine)


def run_position(local_step: int, run_progress: float | None, *, horizon_steps: float) -> float:
    """Returns the position in a learner's schedule, in its inner steps: the larger of its own and the run's.

    Learners of different speed take different numbers of steps in one run, so each has a horizon of its own, of which
    the run's progress, 0 to 1, is a share; None where it is not known. A learner that is slow, joined late or lost its
    checkpoint is behind the run; its own step would train a nearly finished model at the rate of a new one. The fastest
    learner is ahead of the run by its unmerged steps, and reaches the floor with its last step.
    """
    return max(float(local_step), (run_progress or 0.0) * horizon_steps)
