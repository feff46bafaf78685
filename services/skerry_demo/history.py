"""The run's history: the store's own fold of the log, and when each entry was written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from skerry_syncer.store.log.entries import INITIAL_BASE, CommittedItem, Fate
from skerry_syncer.store.log.run_log import RunLog
from skerry_syncer.store.log.state import DeltaState, RunState


@dataclass(frozen=True)
class CommittedVersion:
    """A version that a merge made, and the log position of its commit."""

    position: int
    item: CommittedItem


@dataclass(frozen=True)
class History:
    """A run after its whole log."""

    state: RunState
    unix_s: Mapping[int, float]
    """When the entry at each position was written, by its writer's clock."""

    @property
    def deltas(self) -> list[DeltaState]:
        """Every accepted delta in log order. The pushes that brought the initial weights are not deltas."""
        return [delta for delta in self.state.deltas.values() if delta.item.base_version != INITIAL_BASE]

    @property
    def versions(self) -> list[CommittedVersion]:
        """Every version that a merge made, of all fragments, in log order."""
        committed = [
            CommittedVersion(version.position, version.commit.commit)
            for fragment in self.state.fragments.values()
            for version in fragment.versions.values()
            if version.commit is not None
        ]
        return sorted(committed, key=lambda version: version.position)

    @property
    def initial_position(self) -> int:
        """The first position at which every fragment has its initial weights."""
        return max(fragment.versions[0].position for fragment in self.state.fragments.values())

    def counts_by_fate(self) -> Counter[Fate]:
        """How many deltas met each fate."""
        return Counter(delta.fate for delta in self.deltas)

    def positions_to_judge(self, count: int) -> list[int]:
        """At most `count` positions of commits, evenly spread over time; the last commit is always among them."""
        positions = [version.position for version in self.versions]
        if not positions:
            return []
        first_s, last_s = self.unix_s[positions[0]], self.unix_s[positions[-1]]
        wanted_s = [first_s + (last_s - first_s) * number / count for number in range(1, count + 1)]
        return sorted({min(positions, key=lambda at: (abs(self.unix_s[at] - one_s), -at)) for one_s in wanted_s})


async def read_history(log: RunLog) -> History:
    """The history of the run whose log is `log`, as far as that is folded."""
    end = log.state.position + 1
    return History(log.state, {entry.position: entry.written_at_unix_s async for entry, _ in log.entries(stop=end)})
