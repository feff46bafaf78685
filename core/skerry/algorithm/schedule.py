"""When a learner contributes to a fragment: by inner steps, never by the clock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

# A learner in whose own steps rounds come faster than this share of H never opens one, and is waited for instead.
_SLOW_SHARE: Final = 0.75
# Weight of a new interval between rounds in its moving average.
_RHYTHM_FACTOR: Final = 0.3
# Own steps by which a slow learner is early: its step takes long, and to be late holds up everybody's answer.
_LEAD_STEPS: Final = 1.0


def first_contributions(fragment_count: int, inner_step_count: int) -> tuple[int, ...]:
    """Returns, for each fragment, the step from which its first H steps are counted.

    They are spread over H, so that about fragment_count / H fragments move a step; later rounds keep that spread by
    themselves. The first delta of a fragment thus holds H to nearly 2 H steps: fewer than H would open no round.
    """
    return tuple(number * inner_step_count // fragment_count for number in range(fragment_count))


def is_due(step_count: int, *, contributed_step: int, inner_step_count: int) -> bool:
    """Whether H steps have passed since the last accepted contribution; adoption does not restart the count."""
    return step_count - contributed_step >= inner_step_count


@dataclass
class RoundRhythm:
    """When a fragment's rounds open, in the learner's own steps: a slow learner contributes just before the next.

    An invitation finds it in the middle of a step that is several of the others', and all wait for its delta or leave
    it out. A delta of fewer than H steps opens no round, so being early costs nothing but the steps after it.
    """

    opened_step: int | None = None  # own step count when the last round was heard of
    interval: float | None = None  # moving average, own steps

    def opened(self, step_count: int) -> None:
        """Takes note that a round opened when the learner had taken `step_count` steps."""
        if self.opened_step is not None:
            taken = step_count - self.opened_step
            self.interval = taken if self.interval is None else self.interval + _RHYTHM_FACTOR * (taken - self.interval)
        self.opened_step = step_count

    def is_near(self, step_count: int, *, inner_step_count: int) -> bool:
        """Whether the next round is about to open, for a learner too slow to open it; not where it is long overdue.

        Where several rounds open within one step, the next is always near: its work goes out while it is new.
        """
        if self.opened_step is None or self.interval is None or self.interval >= _SLOW_SHARE * inner_step_count:
            return False
        return self.interval - _LEAD_STEPS <= step_count - self.opened_step <= 2 * max(self.interval, 1.0)
