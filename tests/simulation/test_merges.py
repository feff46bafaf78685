"""Where nothing fails, the replica whose entry closed a round merges it, and no other does."""

from __future__ import annotations

from collections import Counter

from tests.simulation.mixes import MIXES
from tests.simulation.world import live


def test_three_replicas_merge_each_version_once() -> None:
    objects = live(0, MIXES["calm"]).stored
    # Every merge writes an update of its own, whether its commit is admitted or not.
    merges = Counter(name.rpartition("-")[0] for name in objects if "/updates/" in name)
    assert len(merges) > 40
    assert [version for version, count in merges.items() if count > 1] == []
