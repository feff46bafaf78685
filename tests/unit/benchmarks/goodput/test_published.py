"""The simulator beside the published tables."""

from __future__ import annotations

from itertools import islice

import pytest

from benchmarks.goodput.published import Cell, cells


def misses(shown: list[Cell]) -> list[str]:
    return [cell.case for cell in shown if abs(round(cell.simulated) - cell.published) > 3]


def test_jobs_alone_and_two_learners_are_within_three_points_of_the_published_goodput() -> None:
    assert misses(list(islice(cells(0), 12))) == []


@pytest.mark.long
def test_every_cell_is_within_three_points_but_for_learners_that_never_wait() -> None:
    shown = list(cells(0))
    assert misses(shown) == ["unequal hardware, K=8, Skerry"]
    scavenged = [cell.simulated - cell.published for cell in shown if cell.metric == "time"]
    assert len(scavenged) == 4
    assert max(map(abs, scavenged)) <= 1
