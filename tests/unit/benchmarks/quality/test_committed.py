"""The committed outcomes are those of the cases as they stand: whoever changes a default has to measure again."""

from __future__ import annotations

from benchmarks.quality import adapters
from benchmarks.quality.__main__ import COMMITTED
from benchmarks.quality.cases import TABLE, jobs_of
from benchmarks.quality.jobs import Outcomes
from benchmarks.quality.table import lines_of


def test_the_committed_outcomes_fill_the_whole_table() -> None:
    outcomes = Outcomes(COMMITTED)
    assert not [case.case for case in TABLE for job in jobs_of(case) if job not in outcomes]
    lines = [line for case in TABLE for line in lines_of(case, outcomes)]
    assert {line.case for line in lines} == {case.case for case in TABLE}


def test_so_do_those_of_adapters() -> None:
    outcomes = Outcomes(adapters.COMMITTED)
    assert not [job for job in adapters.jobs() if job not in outcomes]
