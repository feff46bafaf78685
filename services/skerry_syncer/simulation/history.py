"""What happened in a scenario, and what it comes to."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from skerry_syncer.simulation.scenario import Region, Scenario

_BIN_COUNT: Final = 120


class Round(NamedTuple):
    """A round that was merged."""

    merged_s: float
    participation: float
    staleness: tuple[int, ...]  # of its deltas, in versions
    step_counts: dict[str, float]  # merged, by learner: a step counts for each fragment's share


@dataclass
class LearnerHistory:
    """What became of a learner's steps."""

    region: Region
    allocated_s: float = 0.0
    taken_step_count: int = 0
    outstanding_step_count: float = 0.0  # at the end they may still be merged
    merged_step_count: float = 0.0
    missing_s: float = 0.0  # of the whole learner, for which slices were away

    @property
    def present_share(self) -> float:
        """The mean share of its chips that train or pause."""
        return max(0.0, 1.0 - self.missing_s / max(self.allocated_s, 1.0))


@dataclass
class History:
    """What happened to learners, and in rounds, which are in the order of time."""

    scenario: Scenario
    learners: dict[str, LearnerHistory] = field(default_factory=dict)
    rounds: list[Round] = field(default_factory=list)

    def shares(self, region: str = "") -> dict[str, float]:
        """Returns what became of the allocated time, of one region or all; seconds count by chips."""
        counted = [each for each in self.learners.values() if region in ("", each.region.name)]
        allocated = training = merging = possible = 0.0
        for each in counted:
            chip_s = each.region.step_s * (each.region.chip_count or 1.0)
            steps, present_s = each.allocated_s / each.region.step_s, chip_s * each.present_share
            allocated += steps * chip_s
            training += each.taken_step_count * present_s
            possible += (steps - each.outstanding_step_count) * chip_s
            merging += each.merged_step_count * present_s
        return {
            "training": training / max(allocated, 1.0),
            "goodput": merging / max(possible, 1.0),
            "merged_step_count": sum(each.merged_step_count for each in counted),
        }

    def summary(self) -> dict[str, float]:
        """Returns the shares of all learners, and what rounds were like."""
        return self.shares() | _rounds_summary(self.rounds) | {"version_count": len(self.rounds)}

    def over_time(self) -> list[dict[str, float]]:
        """Returns what was merged in each of equal times, and what rounds were like."""
        width_s = self.scenario.duration_s / _BIN_COUNT
        chips = {name: each.region.chip_count or 1.0 for name, each in self.learners.items()}
        present = {name: chips[name] * each.present_share for name, each in self.learners.items()}
        binned = defaultdict[int, list[Round]](list)
        for each in self.rounds:
            binned[int(each.merged_s / width_s)].append(each)
        rows = []
        for number in range(_BIN_COUNT):
            merged = [item for each in binned[number] for item in each.step_counts.items()]
            work = sum(count * self.learners[name].region.step_s * present[name] for name, count in merged)
            counts = {"goodput": work / width_s / sum(chips.values()), "merged_step_count": sum(n for _, n in merged)}
            rows.append({"start_s": number * width_s} | counts | _rounds_summary(binned[number]))
        return rows


def _rounds_summary(rounds: list[Round]) -> dict[str, float]:
    """Returns what rounds were like; not a number where there were none."""
    staleness = [count for each in rounds for count in each.staleness]
    return {
        "participation": sum(each.participation for each in rounds) / len(rounds) if rounds else math.nan,
        "staleness": sum(staleness) / len(staleness) if staleness else math.nan,
        "worst_staleness": max(staleness, default=0),
    }


def cost(history: History, without: History) -> dict[str, float]:
    """Returns how many merged steps outages cost, and what of it is lost by regions that no outage took away."""
    away, total, others = {outage.place for outage in history.scenario.outages}, 0.0, 0.0
    for name, each in without.learners.items():
        behind = each.merged_step_count - history.learners[name].merged_step_count
        total += behind
        others += 0.0 if each.region.name in away else behind
    return {"merged_step_count": total, "others_merged_step_count": others}
