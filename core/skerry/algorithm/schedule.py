"""When a learner contributes to a fragment: by inner steps, never by the clock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

# A learner in whose own steps rounds come faster than this share of H never opens one, and is waited for instead.
_SLOW_SHARE: Final = 0.75
# Weight of a new interval between rounds in its moving average.
_RHYTHM_FACTOR: Final = 0.3
# Of a round. Less is missing where all are in and one is late, or one that is slow or dead is not: nobody brings that.
_LEAST_MISSING: Final = 0.2
# Versions whose parts are remembered: many more than a round has.
_PARTS_KEPT: Final = 1000
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


class RoundParts:
    """The parts that a fragment's rounds are merged in, by version, as far as this learner has heard of them."""

    def __init__(self) -> None:
        """Knows of none, and takes rounds for whole ones."""
        self._parts: dict[int, float] = {}
        self._last = 1.0

    def add(self, version: int, participation: float) -> None:
        """Takes note that this part of a round, 1 for a whole one, was merged into `version`."""
        self._last = participation if 0 < participation <= 1 else 1.0
        self._parts[version] = self._last
        if len(self._parts) > _PARTS_KEPT:
            del self._parts[next(iter(self._parts))]

    def gap(self, version: int) -> None:
        """Takes note that nothing is known of how the run came to `version`, unless it is: it passes for a whole round.

        So after a stream that broke, and after a roll-back.
        """
        self._parts.setdefault(version, 1.0)

    def missing(self, merged_version: int, newest_version: int) -> float:
        """Returns how much of the round that `merged_version` was part of has not come by `newest_version`, 0 to 1.

        Versions that it has not heard of yet are taken to be like the one it heard of last.
        """
        missing = 1.0 if merged_version <= newest_version else 0.0
        for version in range(merged_version, newest_version + 1):
            missing -= self._parts.get(version, self._last)
            if missing < _LEAST_MISSING:
                return 0.0
        return missing
