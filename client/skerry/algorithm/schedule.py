"""When a learner sends a delta of a fragment: by its own inner steps, never by the clock.

With t the learner's steps, c its steps at the last accepted delta, o those at which the last round opened, S the run's
steps, and r the moving average of the steps that the learner takes while the run goes on by a round of H,

    c_p = floor(p H / P)                               (1)  at the start, for fragment p of P
    t - c >= H                                         (2)  a delta is due
    r <- r + 0.3 (H (t - t') / (S - S') - r)           (3)  when a round opens, from the third on, S' at t' being the
                                                            last measurement
    r < 0.75 H  and  r - 1 <= t - o <= 2 max(r, 1)     (4)  the next round is near

(4) is for slow learners. In their own steps the run goes on by H more often than every H, so (2) would make them late:
they are in the middle of a long step when a round opens, and the others wait for their delta or close the round without
it. They send just before the round instead. A delta of fewer than H steps opens no round, so being early costs only the
work of the steps that follow. A slow learner is told by the run's steps, not by its rounds: rounds may open more often
than that because some learner's deltas come late, and then rounds are short. A learner's first two rounds tell nothing:
while its fragments begin, the run's progress lags behind it, or catches up.

Source: Decoupled DiLoCo (arXiv 2604.21428) for H and for spreading the fragments over it; (3) and (4) are Skerry's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

# Of H. A learner for which the run goes on faster than this never opens a round.
_SLOW_SHARE: Final = 0.75
# Weight of what the last round took in the moving average.
_RHYTHM_FACTOR: Final = 0.3
# Openings of a learner's first rounds, from which nothing is measured.
_UNMEASURED_COUNT: Final = 2
# Own steps by which a slow learner is early.
_LEAD_STEPS: Final = 1.0


def first_contributions(fragment_count: int, inner_step_count: int) -> tuple[int, ...]:
    """Returns c_p of equation (1) for each fragment, so that about fragment_count / H fragments move a step.

    The first delta of a fragment thus holds H to nearly 2 H steps. Later rounds keep the spread by themselves.
    """
    return tuple(number * inner_step_count // fragment_count for number in range(fragment_count))


def is_due(step_count: int, *, contributed_step: int, inner_step_count: int) -> bool:
    """Whether a delta is due, equation (2); adopting a version does not restart the count."""
    return step_count - contributed_step >= inner_step_count


@dataclass
class RoundRhythm:
    """How many steps a learner takes while the run goes on by H, and when the last round of a fragment opened."""

    # t' and S'; S is the mean over fragments, as last reported.
    measured_step: int = 0
    measured_run_step: float = 0.0
    opened_count: int = 0
    opened_step: int | None = None  # o
    interval: float | None = None  # r

    def opened(self, step_count: int, run_step_count: float, *, inner_step_count: int) -> None:
        """Takes note that a round opened at these steps of the learner and of the run, equation (3)."""
        self.opened_step = step_count
        self.opened_count += 1
        run_steps = run_step_count - self.measured_run_step
        if run_steps > 0 and self.opened_count > _UNMEASURED_COUNT:
            taken = inner_step_count * (step_count - self.measured_step) / run_steps
            self.interval = taken if self.interval is None else self.interval + _RHYTHM_FACTOR * (taken - self.interval)
        # It stands still where a round was void or its version is not reported yet.
        if run_steps != 0 or self.opened_count <= _UNMEASURED_COUNT:
            self.measured_step, self.measured_run_step = step_count, run_step_count

    def is_near(self, step_count: int, *, inner_step_count: int) -> bool:
        """Whether the next round is near, equation (4)."""
        if self.opened_step is None or self.interval is None or self.interval >= _SLOW_SHARE * inner_step_count:
            return False
        return self.interval - _LEAD_STEPS <= step_count - self.opened_step <= 2 * max(self.interval, 1.0)
