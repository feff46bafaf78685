"""The demo's figures and the claims they have to bear out, on a course that can be checked by hand."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from skerry_demo.judgement import JudgedPosition
from skerry_demo.plan import affordable_steps
from skerry_demo.summary import Evidence, summarise
from tests.unit.demo.made_up_course import ENTRIES, accepted, written_history, written_metrics

_ASKED_FOR = {
    "merged_loss",
    "single_loss",
    "initial_loss",
    "versions_committed",
    "deltas_acknowledged",
    "deltas_merged",
    "deltas_named_unmerged",
    "bits_per_parameter_up",
    "bits_per_parameter_down",
    "max_step_stall_ms",
    "median_step_ms",
    "learner_killed_at_s",
    "learner_back_at_s",
    "syncer_killed_at_s",
    "syncer_back_at_s",
    "verify_ok",
}


def test_the_figures_are_those_of_the_evidence(evidence: Evidence) -> None:
    summary = summarise(evidence)
    assert (summary.merged_loss, summary.single_loss, summary.initial_loss) == (2.5, 3.0, 5.5)
    assert summary.deltas_acknowledged == 6 == summary.deltas_merged + summary.deltas_named_unmerged
    assert summary.bits_per_parameter_up == pytest.approx(4.0)
    assert summary.bits_per_parameter_down == pytest.approx(4.8)
    assert (summary.max_step_stall_ms, summary.max_step_stall_learner) == (12.5, "eu-west")
    assert summary.median_step_ms == 90.0
    assert (summary.learner_killed_at_s, summary.learner_back_at_s) == (2, 3)
    assert (summary.syncer_killed_at_s, summary.syncer_back_at_s) == (4, 4.5)
    assert summary.steps_without_syncer == 4
    assert summary.tokens_per_learner == summary.single_tokens == 600
    assert summary.failures == []


def test_the_json_has_every_figure_that_was_asked_for(evidence: Evidence) -> None:
    figures = json.loads(json.dumps(asdict(summarise(evidence))))
    assert figures.keys() >= _ASKED_FOR


def test_a_killed_learner_is_counted_over_both_of_its_processes(evidence: Evidence) -> None:
    killed = next(learner for learner in summarise(evidence).learners if learner.learner_id == "eu-west")
    assert (killed.process_count, killed.deltas_acknowledged, killed.deltas_merged, killed.steps) == (2, 3, 1, 40)


def test_no_better_than_one_learner_alone_is_a_failure(evidence: Evidence) -> None:
    worse = replace(evidence, merged=[JudgedPosition(8, evidence.merged[-1].unix_s, 3.0)])
    assert [check.name for check in summarise(worse).failures] == ["learning together helps"]


def test_a_version_that_does_not_replay_is_a_failure(evidence: Evidence) -> None:
    assert [check.name for check in summarise(replace(evidence, verify_ok=False)).failures] == ["every version replays"]


def test_a_delta_without_a_fate_is_a_failure(evidence: Evidence) -> None:
    summary = summarise(replace(evidence, history=written_history(*ENTRIES[:9])))
    assert [check.name for check in summary.failures] == ["every acknowledged delta has its fate"]


def test_an_acknowledged_delta_that_the_log_lacks_is_a_failure(evidence: Evidence, tmp_path: Path) -> None:
    follower = written_metrics(tmp_path / "more.jsonl", "us-east", steps=60, acknowledged=[3], stall_ms=3.0)
    learners = {**evidence.learners, "us-east": follower}
    assert not summarise(replace(evidence, learners=learners)).ledger_balances


def test_an_answer_that_died_with_the_killed_learner_is_named_and_balances(evidence: Evidence) -> None:
    unheard = (accepted("b4", "eu-west", base=2, session="eu-west-again"),)
    summary = summarise(replace(evidence, history=written_history(*ENTRIES[:9], unheard, ENTRIES[9])))
    assert summary.deltas_accepted_unheard == 1
    assert summary.ledger_balances


def test_an_answer_that_a_living_learner_never_heard_is_a_failure(evidence: Evidence) -> None:
    unheard = (accepted("a3", "us-east", base=2),)
    history = written_history(*ENTRIES[:9], unheard, ENTRIES[9])
    assert not summarise(replace(evidence, history=history)).ledger_balances


def test_a_long_pause_is_said_but_does_not_fail_the_demo(evidence: Evidence) -> None:
    lines = evidence.learners["us-east"].lines
    lines[10] = replace(lines[10], sync_stall_ms=80.0)
    summary = summarise(evidence)
    assert summary.max_step_stall_ms == 80.0
    assert [check.name for check in summary.checks if not check.is_met] == ["training steps are not delayed"]
    assert summary.failures == []


def test_a_slow_machine_takes_fewer_steps_but_never_too_few() -> None:
    assert affordable_steps(0.02, 200) == 1000
    assert affordable_steps(0.1, 200) == int((200 - 45) / 0.3)
    assert affordable_steps(5.0, 200) == 400
