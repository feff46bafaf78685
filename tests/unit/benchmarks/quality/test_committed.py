"""The committed outcomes are those of the cases as they stand: whoever changes a default has to measure again."""

from __future__ import annotations

from benchmarks.quality import adapters, mixes
from benchmarks.quality.__main__ import COMMITTED
from benchmarks.quality.arms import Job
from benchmarks.quality.cases import TABLE, jobs_of
from benchmarks.quality.jobs import Outcomes
from benchmarks.quality.table import lines_of
from benchmarks.quality.task import BYTES


def test_the_committed_outcomes_fill_the_whole_table() -> None:
    outcomes = Outcomes(COMMITTED)
    assert not [case.case for case in TABLE for job in jobs_of(case) if job not in outcomes]
    lines = [line for case in TABLE for line in lines_of(case, outcomes)]
    assert {line.case for line in lines} == {case.case for case in TABLE}


def test_so_do_those_of_adapters() -> None:
    outcomes = Outcomes(adapters.COMMITTED)
    assert not [job for job in adapters.jobs() if job not in outcomes]


def test_so_do_those_of_the_mixes_for_reporting() -> None:
    outcomes, size = Outcomes(mixes.COMMITTED), mixes.size_of(BYTES, "")
    for mix in (mixes.draw(number, size) for number in mixes.REPORTED):
        arms = [mixes.together(mix, size), *mixes.parts(mix, size, with_groups=False).values()]
        assert all(Job(arm, mixes.REPORT_SEED) in outcomes for arm in arms)
