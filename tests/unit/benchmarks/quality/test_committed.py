"""The committed outcomes are those of the cases and defaults as they stand: whoever changes one measures again."""

from __future__ import annotations

import json

from click.testing import CliRunner

from benchmarks.quality import adapters, mixes
from benchmarks.quality.__main__ import COMMITTED
from benchmarks.quality.cases import TABLE, jobs_of
from benchmarks.quality.jobs import Outcomes
from benchmarks.quality.table import lines_of
from skerry.wire.policy import Policy


def test_the_default_policy_is_the_one_that_was_measured() -> None:
    measured = json.loads((COMMITTED.parent / "policy.json").read_text())
    default = Policy().to_json()
    assert {name: default[name] for name in measured} == measured, (
        "train the committed outcomes anew, then change policy.json"
    )


def test_the_committed_outcomes_fill_the_whole_table() -> None:
    outcomes = Outcomes(COMMITTED)
    assert not [case.case for case in TABLE for job in jobs_of(case) if job not in outcomes]
    lines = [line for case in TABLE for line in lines_of(case, outcomes)]
    assert {line.case for line in lines} == {case.case for case in TABLE}


def test_so_do_those_of_adapters() -> None:
    outcomes = Outcomes(adapters.COMMITTED)
    assert not [job for job in adapters.jobs() if job not in outcomes]


def test_so_do_those_of_the_mixes_for_reporting() -> None:
    result = CliRunner().invoke(mixes.main, ["--committed"])
    assert result.exit_code == 0, result.output
