"""The public table: how rates are tuned, and that what is committed belongs to the table as it stands."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.public import __main__ as command
from benchmarks.public.cases import ALONE, DECOUPLED, KINDS, LENGTHS, TUNING_SEEDS, jobs, lengths_of, seeds_of, tune
from benchmarks.quality.arms import DataParallel, Job, Outcome
from benchmarks.quality.jobs import Outcomes

TEXT = command.COMMITTED_TEXT


@pytest.mark.parametrize("best", [1e-3, 8e-3, 6.4e-2])
def test_the_tuned_rate_is_the_one_whose_neighbours_are_worse_wherever_it_lies(best: float) -> None:
    tried = []

    def loss_of(job: Job) -> float:
        assert isinstance(job.arm, DataParallel)
        assert job.seed in TUNING_SEEDS
        tried.append(job.arm.peak_rate)
        return abs(math.log(job.arm.peak_rate / best))

    assert tune(ALONE, "0.8M", TEXT, loss_of) == best
    assert {best / 2, best, best * 2} <= set(tried)


def test_no_result_is_reported_on_a_seed_that_rates_are_tuned_on() -> None:
    rates = {name: 1e-3 for name, kind in KINDS.items() if kind.tuned_as is None}
    for size, lengths in LENGTHS.items():
        made = jobs(KINDS, size, lengths, TEXT, rates)
        assert made
        assert not {job.seed for job in made} & set(TUNING_SEEDS)


def test_committed_outcomes_are_those_of_the_table_as_it_stands() -> None:
    outcomes, known = Outcomes(command.COMMITTED), set[Job]()
    for size, lengths in LENGTHS.items():
        rates = {}

        def loss_of(job: Job) -> float:
            known.add(job)
            return outcomes[job].losses[TEXT]

        for name, kind in KINDS.items():
            if kind.tuned_as is None and lengths_of(name, size):
                try:
                    rates[name] = tune(name, size, TEXT, loss_of)
                except KeyError:
                    continue
        known.update(
            jobs([name for name, kind in KINDS.items() if (kind.tuned_as or name) in rates], size, lengths, TEXT, rates)
        )
    assert not [job for job in outcomes if job not in known]


def test_the_committed_table_is_shown_without_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "DIRECTORY", tmp_path)
    result = CliRunner().invoke(command.main, ["--committed"])
    assert result.exit_code == 0, result.output
    assert "2.137 ± 0.018" in result.output
    assert (tmp_path / "public-0.8M.png").stat().st_size > 10_000


def test_rows_are_compared_under_the_seeds_that_both_have(tmp_path: Path) -> None:
    from benchmarks.public.table import Results  # here: matplotlib is slow to load

    outcomes, rates = Outcomes(tmp_path / "outcomes.jsonl"), {ALONE: 1e-3, DECOUPLED: 1e-3}
    results = Results(outcomes, "0.8M", TEXT, rates)
    assert results.loss(ALONE, 500) is None
    for name, losses in {ALONE: (2.0, 3.0), DECOUPLED: (1.0, 1.5, 9.0)}.items():
        for job, value in zip(seeds_of(name, "0.8M", TEXT, 500, rates), losses, strict=False):
            outcomes.add(job, Outcome({TEXT: value}, (500,)))
    loss, over = results.loss(DECOUPLED, 500), results.over(DECOUPLED, ALONE, 500)
    assert loss is not None
    assert over is not None
    assert loss.samples == (1.0, 1.5, 9.0)
    assert over.samples == (-50.0, -50.0)
    assert results.share(DECOUPLED, 500) is None  # nothing is known of one place


def test_an_outcome_of_which_only_the_beginning_was_written_is_trained_again(tmp_path: Path) -> None:
    path, arm, outcome = (
        tmp_path / "outcomes.jsonl",
        KINDS[ALONE].make("0.8M", TEXT, 500, 1e-3),
        Outcome({TEXT: 2.0}, (500,)),
    )
    for seed in (0, 1):
        Outcomes(path).add(Job(arm, seed), outcome)
    whole = path.read_bytes()
    path.write_bytes(whole[:-40])
    assert list(Outcomes(path)) == [Job(arm, 0)]
    Outcomes(path).add(Job(arm, 1), outcome)
    assert path.read_bytes() == whole


def test_options_that_leave_no_row_are_refused_before_anything_is_trained() -> None:
    result = CliRunner().invoke(command.main, ["--size", "3M", "--only", "decoupled, plain mean"])
    assert (result.exit_code, "no row has these options" in result.output) == (2, True)
