"""The committed outcomes are those of the cases as they stand: whoever changes a default has to measure again."""

from __future__ import annotations

from pathlib import Path

from benchmarks import schedule
from benchmarks.quality.__main__ import COMMITTED
from benchmarks.quality.cases import TABLE, jobs_of
from benchmarks.quality.jobs import Outcomes
from benchmarks.quality.table import lines_of


def test_the_committed_outcomes_fill_the_whole_table() -> None:
    outcomes = Outcomes(COMMITTED)
    assert not [case.case for case in TABLE for job in jobs_of(case) if job not in outcomes]
    lines = [line for case in TABLE for line in lines_of(case, outcomes)]
    assert {line.case for line in lines} == {case.case for case in TABLE}


def test_the_page_shows_every_bound_as_it_was_measured() -> None:
    outcomes = Outcomes(COMMITTED)
    page = (Path(__file__).parents[2] / "docs" / "learning.md").read_text().splitlines()
    bounded = [line for case in TABLE for line in lines_of(case, outcomes) if line.bound is not None]
    heading = next(number for number, line in enumerate(page) if line.startswith("| case | measured"))
    table = page[heading + 2 : page.index("", heading)]
    assert table == [line.to_markdown() for line in bounded]


def test_the_page_shows_the_schedule_that_the_defaults_give() -> None:
    page = (Path(__file__).parents[2] / "docs" / "learning.md").read_text().splitlines()
    assert not [row for row in schedule.rows() if row not in page]
