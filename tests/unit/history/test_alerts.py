"""What an observer is told to look at, and that Prometheus has the same rules."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

from skerry.history.alerts import Severity, alerts, prometheus_rules
from skerry.history.run_history import RunHistory
from skerry.v1 import types_pb2 as v1
from tests.support.recorded_run import event, learner, round_events, started


def committed(version: int, *names: str) -> v1.VersionCommitted:
    merged = [v1.DeltaFate(learner_id=name, weight_share=1 / len(names)) for name in names]
    return v1.VersionCommitted(version=v1.FragmentVersion(fragment="head", version=version), merged=merged)


def raised(seen: RunHistory, now_s: float) -> dict[str, str]:
    return {alert.rule: alert.summary for alert in alerts(seen, now_s)}


def test_a_learner_that_reports_raises_nothing() -> None:
    assert raised(started(event(100, learner=learner(loss=2.0))), 101) == {}


def test_silence_is_a_warning_after_a_minute_and_critical_after_five() -> None:
    seen = started(event(100, learner=learner()))
    assert raised(seen, 159) == {}
    (warning,), (critical,) = alerts(seen, 161), alerts(seen, 401)
    assert (warning.severity, warning.summary) == (Severity.WARNING, "us was last heard of 61 s ago")
    assert (critical.severity, critical.summary) == (Severity.CRITICAL, "us was last heard of 5 min ago")
    assert warning.key == critical.key


def test_a_learner_that_will_not_come_back_is_not_missed_once_it_is_ejected() -> None:
    seen = started(event(100, learner=learner()))
    assert "skerry runs eject demo us" in alerts(seen, 1000)[0].action
    seen.apply(event(1000, position=6, ejection_changed=v1.EjectionChanged(learner_id="us", is_ejected=True)))
    assert raised(seen, 2000) == {}


def test_a_learner_that_left_is_not_missed() -> None:
    left = v1.LearnerStatus(learner_id="us", has_left=True)
    assert raised(started(event(100, learner=learner()), event(101, learner=left)), 1000) == {}


def test_a_learner_misses_rounds_of_its_own_length() -> None:
    fast, slow = learner("fast"), learner("slow")
    fast.report.step_time.FromMilliseconds(500)  # 12 s for H steps
    slow.report.step_time.FromMilliseconds(5000)
    seen = started(event(100, learner=fast), event(100, learner=slow))

    def severities(last_version: int) -> list[tuple[str, Severity]]:
        first = seen.fragments["head"].version + 1
        for number in range(first, last_version + 1):
            seen.apply(event(100 + 12 * number, version_committed=committed(number, "other")))
        return [(alert.subject, alert.severity) for alert in alerts(seen, 101) if alert.rule == "SkerryMissedRounds"]

    assert severities(1) == []
    assert severities(2) == [("fast", Severity.WARNING)]
    assert severities(6) == [("fast", Severity.CRITICAL)]
    seen.apply(event(175, version_committed=committed(7, "fast")))
    assert severities(8) == []


def test_a_learner_that_misses_short_rounds_is_told_once_that_lasts() -> None:
    seen = started(event(100, learner=learner("slow")))
    for number in range(1, 14):
        seen.apply(event(100 + 0.4 * number, version_committed=committed(number, "other")))
        missed = "SkerryMissedRounds" in raised(seen, 100 + 0.4 * number)
        assert missed == (number >= 13), number


def test_a_round_that_is_open_three_times_as_long_as_usual_is_told_before_its_version_is_late() -> None:
    rounds = [message for number in range(1, 6) for message in round_events(number, 100.0 * number, "us", "eu")]
    seen = started(event(500, learner=learner()), *rounds, *round_events(6, 600.0, "us")[:1])
    seen.apply(event(608, learner=learner()))
    assert raised(seen, 609) == {}
    told = "a round of head has been open for 11 s; usually it takes 2.5 s"
    assert raised(seen, 611)["SkerryNoVersion"] == told


def test_a_version_that_is_three_times_as_late_as_usual_is_told() -> None:
    commits = [event(100 + 20 * number, version_committed=committed(number, "us")) for number in range(1, 6)]
    seen = started(event(200, learner=learner()), *commits, event(255, learner=learner()))
    assert raised(seen, 255) == {}
    late = raised(seen, 261)
    assert late == {"SkerryNoVersion": "head has had no new version for 61 s; usually one comes every 20 s"}


def test_a_replica_whose_clock_is_an_hour_off_raises_nothing() -> None:
    seen = started()
    for now_s in range(1000, 1200, 10):
        log_s = now_s + 3600.0 * (now_s // 10 % 3 - 1)
        seen.apply(event(log_s, learner=learner()), float(now_s))
        seen.apply(event(log_s, version_committed=committed(now_s // 10 - 99, "us")), float(now_s))
    assert raised(seen, 1195.0) == {}
    assert seen.fragments["head"].usual_s == pytest.approx(10.0)


def test_what_learners_report_of_the_store_their_deltas_and_their_loss() -> None:
    for problem, rule in (
        ("STORE_FULL", "SkerryStoreFull"),
        ("STORE_UNAVAILABLE", "SkerryStoreFailing"),
        ("QUARANTINED", "SkerryQuarantine"),
    ):
        assert list(raised(started(event(100, learner=learner(problem=problem))), 101)) == [rule]
    (alert,) = alerts(started(event(100, learner=learner(loss=math.nan))), 101)
    assert (alert.rule, alert.action.count("skerry rollback demo")) == ("SkerryLossNotFinite", 1)


def test_a_report_that_fails_the_gate_is_told_until_the_judge_reports_better() -> None:
    policy = v1.Policy(gate=v1.Gate(judge="eval", metric="held-out", margin=0.1))
    report = v1.MetricsReport(judge="eval", position=9, better_position=4, run_step_count=9, metrics={"held-out": 2.5})
    seen = started(event(100, policy_changed=policy), event(101, metrics_reported=report))
    (alert,) = alerts(seen, 102)
    assert alert.summary == "eval reports that held-out at position 9 is 2.5, worse than at 4"
    seen.apply(event(102, metrics_reported=v1.MetricsReport(judge="eval", position=9, metrics={"accuracy": 0.3})))
    assert len(alerts(seen, 103)) == 1, "which says nothing of the gate's metric"
    seen.apply(
        event(
            103,
            metrics_reported=v1.MetricsReport(judge="eval", position=12, run_step_count=12, metrics={"held-out": 2.0}),
        )
    )
    assert alerts(seen, 104) == []
    assert [point.value for point in seen.metrics["eval", "held-out"]] == [2.5, 2.0]
    forgotten = v1.MetricsReport(judge="eval", position=1, metrics={"held-out": 9.0})
    seen.apply(event(105, metrics_reported=forgotten))
    assert len(seen.metrics["eval", "held-out"]) == 2, "nobody knows at which step it is to be drawn"


def test_the_committed_rules_of_prometheus_are_those_of_the_table() -> None:
    path = Path(__file__).parents[3] / "docker" / "alerts.yml"
    assert yaml.safe_load(path.read_text()) == prometheus_rules(), f"run `make alerts` to renew {path.name}"
