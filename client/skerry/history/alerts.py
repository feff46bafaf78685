"""What is wrong with a run, and what to do about it: one table for the console, its webhook, the report and Prometheus.

A rule has an expression for Prometheus, a condition on a `RunHistory`, or both. `prometheus_rules` gives
docker/alerts.yml.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, NamedTuple

from skerry.history.run_history import LearnerView, RunHistory, learner_state
from skerry.v1 import types_pb2 as v1


class Severity(StrEnum):
    """How urgent an alert is."""

    CRITICAL = "critical"
    WARNING = "warning"


class Finding(NamedTuple):
    """A subject, such as a learner, and what is wrong with it."""

    subject: str
    summary: str
    severity: Severity | None = None  # None: the rule's


class Alert(NamedTuple):
    """A rule that holds for a subject."""

    rule: str
    subject: str
    severity: Severity
    summary: str
    action: str

    @property
    def key(self) -> tuple[str, str]:
        """What stays the same while the alert lasts."""
        return self.rule, self.subject


@dataclass(frozen=True)
class Rule:
    """A condition that a person should know of."""

    name: str
    severity: Severity
    action: str  # {run} and {subject} are filled in
    find: Callable[[RunHistory, float], Iterator[Finding]] | None = None  # of the history and the time now
    expression: str = ""  # of Prometheus
    lasting: str = ""  # how long the expression must hold
    summary: str = ""  # of the alert in Prometheus


_LOST_S: Final = 300.0
_SILENT_S: Final = 60.0
_LATE_FACTOR: Final = 3.0
_MISSED_ROUNDS: Final = 2
_MANY_MISSED_ROUNDS: Final = 5
_LONG_S: Final = 900.0


def _open(history: RunHistory) -> bool:
    return history.status == v1.RUN_STATUS_OPEN


def _silent(history: RunHistory, now_s: float) -> Iterator[Finding]:
    if not _open(history):
        return
    for name, view in history.learners.items():
        if view.status.has_left or view.heard_at_s is None:
            continue
        silent_s = now_s - view.heard_at_s
        if silent_s >= _SILENT_S:
            severity = Severity.CRITICAL if silent_s >= _LOST_S else Severity.WARNING
            yield Finding(name, f"{name} was last heard of {duration_text(silent_s)} ago", severity)


def _idle(history: RunHistory, _: float) -> Iterator[Finding]:
    for name, view in history.learners.items():
        fragment, missed = history.missed_rounds(view)
        if view.status.is_live and missed >= _MISSED_ROUNDS and _open(history):
            severity = Severity.CRITICAL if missed >= _MANY_MISSED_ROUNDS else Severity.WARNING
            yield Finding(name, f"{name} has missed {missed:.0f} of its rounds of {fragment}", severity)


def _not_participating(history: RunHistory, now_s: float) -> Iterator[Finding]:
    for name, view in history.learners.items():
        attached_s = 0.0 if view.attached_at_s is None else now_s - view.attached_at_s
        if _open(history) and learner_state(view.status) == "live" and attached_s >= _LONG_S:
            yield Finding(name, f"{name} is attached, and nothing of it is merged")


def _late(history: RunHistory, now_s: float) -> Iterator[Finding]:
    if not _open(history) or not any(view.status.is_live for view in history.learners.values()):
        return
    for name, fragment in history.fragments.items():
        if fragment.last is None or not fragment.usual_s:
            continue
        open_s = 0.0 if fragment.open_since_s is None else now_s - fragment.open_since_s
        if fragment.usual_round_s and open_s > max(_LATE_FACTOR * fragment.usual_round_s, _SILENT_S / 6):
            usual = duration_text(fragment.usual_round_s)
            yield Finding(
                name, f"a round of {name} has been open for {duration_text(open_s)}; usually it takes {usual}"
            )
            continue
        age_s = now_s - fragment.heard_at_s
        if age_s > max(_LATE_FACTOR * fragment.usual_s, _SILENT_S / 6):
            usual = duration_text(fragment.usual_s)
            yield Finding(
                name, f"{name} has had no new version for {duration_text(age_s)}; usually one comes every {usual}"
            )


def _reports(problem: str) -> Callable[[RunHistory, float], Iterator[Finding]]:
    def find(history: RunHistory, _: float) -> Iterator[Finding]:
        names = [name for name, view in history.learners.items() if _has_problem(view, problem)]
        if names:
            yield Finding("store", f"{', '.join(sorted(names))}: {problem}")

    return find


def _has_problem(view: LearnerView, problem: str) -> bool:
    return view.status.is_live and view.status.report.problem == problem


def _quarantined(history: RunHistory, _: float) -> Iterator[Finding]:
    for name, view in history.learners.items():
        if _has_problem(view, "QUARANTINED"):
            reasons = ", ".join(sorted({fate.reason for fate in view.status.fates if fate.fate == v1.FATE_QUARANTINED}))
            yield Finding(name, f"the last delta of {name} was quarantined: {reasons or 'no reason given'}")


def _not_finite(history: RunHistory, _: float) -> Iterator[Finding]:
    for name, view in history.learners.items():
        last = view.losses.last
        if view.status.is_live and last is not None and not math.isfinite(last.value):
            yield Finding(name, f"the loss of {name} is {last.value}")
    for (judge, metric), series in history.metrics.items():
        last = series.last
        if last is not None and not math.isfinite(last.value):
            yield Finding(f"{judge}/{metric}", f"{metric} of the merged model is {last.value}, says {judge}")


def _failed_gate(history: RunHistory, _: float) -> Iterator[Finding]:
    gate = history.policy.gate
    reports = (report for report in reversed(history.reports) if report.judge == gate.judge)
    report = next((report for report in reports if gate.metric in report.metrics), None)
    if report is not None and report.better_position:
        value = report.metrics[gate.metric]
        facts = f"{gate.metric} at position {report.position} is {value:.4g}, worse than at {report.better_position}"
        yield Finding(gate.metric, f"{gate.judge} reports that {facts}")


RULES: Final = (
    Rule(
        "SkerryReplicaDown",
        Severity.WARNING,
        "Look whether the process runs. Learners go on with the other replicas; without any they train alone.",
        expression='up{job="skerry"} == 0',
        lasting="1m",
        summary="{{ $labels.instance }} has not answered for a minute",
    ),
    Rule(
        "SkerryLearnerSilent",
        Severity.WARNING,
        "Look whether its process runs, and whether it reaches the syncer. The others go on without it. If it will not "
        "come back: `skerry runs eject {run} {subject}`.",
        find=_silent,
    ),
    Rule(
        "SkerryMissedRounds",
        Severity.WARNING,
        "Its own log says what became of its deltas. The others go on without it.",
        find=_idle,
    ),
    # A version of each fragment is due every H steps, so three times as long is late, however many fragments there are.
    Rule(
        "SkerryNoVersion",
        Severity.CRITICAL,
        "`skerry watch {run}` shows its learners and its open rounds; the syncers' logs say why merges fail.",
        find=_late,
        expression="""\
min by (run) (skerry_version_age_seconds)
  > 3 * max by (run) (skerry_round_length_seconds)
and on (run) max by (run) (skerry_learners{state="live"}) > 0""",
        lasting="1m",
        summary="run {{ $labels.run }} has learners, and no new version for {{ $value | humanizeDuration }}",
    ),
    Rule(
        "SkerryLearnerNotParticipating",
        Severity.WARNING,
        "`skerry watch {run}` names them; their own logs say what became of their deltas.",
        find=_not_participating,
        expression="""\
max by (run) (skerry_learners{state="live"}) - max by (run) (skerry_learners{state="participating"}) > 0""",
        lasting="15m",
        summary="{{ $value }} learners of run {{ $labels.run }} are attached, and nothing of theirs is merged",
    ),
    Rule(
        "SkerryStoreFailing",
        Severity.CRITICAL,
        "Check the store's network, credentials and disk. Nothing that was acknowledged is lost.",
        find=_reports("STORE_UNAVAILABLE"),
        expression='sum by (instance) (rate(skerry_store_errors_total{reason="STORE_UNAVAILABLE"}[5m])) > 0.05',
        lasting="2m",
        summary="""the store refuses {{ printf "%.2f" $value }} calls a second of {{ $labels.instance }}""",
    ),
    Rule(
        "SkerryStoreFull",
        Severity.CRITICAL,
        "Free space, or run `skerry gc`. Learners train on and keep their work meanwhile.",
        find=_reports("STORE_FULL"),
        expression='sum by (instance) (increase(skerry_store_errors_total{reason="STORE_FULL"}[5m])) > 0',
        summary="the store of {{ $labels.instance }} is full",
    ),
    # Not `increase`: the first one of its reason begins a series, which has nothing to increase from.
    Rule(
        "SkerryQuarantine",
        Severity.WARNING,
        "`skerry log {run}` names the learner. Look at its data, loss and machine.",
        find=_quarantined,
        expression="""\
max by (run, reason) (skerry_deltas_decided_total{fate="quarantined"})
  > (max by (run, reason) (skerry_deltas_decided_total{fate="quarantined"} offset 30m)
     or max by (run, reason) (skerry_deltas_decided_total{fate="quarantined"}) * 0)""",
        summary="deltas of run {{ $labels.run }} were quarantined: {{ $labels.reason }}",
    ),
    Rule(
        "SkerryLossNotFinite",
        Severity.CRITICAL,
        "Roll back to a version before it: `skerry log {run}` shows positions, `skerry rollback {run} --to POSITION`.",
        find=_not_finite,
    ),
    Rule(
        "SkerryGate",
        Severity.CRITICAL,
        "`skerry log {run}` has the reports, and the roll-back if the gate made one.",
        find=_failed_gate,
        expression="max by (run) (increase(skerry_gate_failures_total[30m])) > 0",
        summary="a judge's metric of run {{ $labels.run }} became worse than the gate allows",
    ),
    Rule(
        "SkerryEventLoopLag",
        Severity.WARNING,
        "Give the process more cores, or fewer runs; deltas and leases wait for it.",
        expression="""\
histogram_quantile(0.99, sum by (instance, le) (rate(skerry_event_loop_lag_seconds_bucket[5m]))) > 0.25""",
        lasting="5m",
        summary="the event loop of {{ $labels.instance }} is {{ $value | humanizeDuration }} late",
    ),
)


def alerts(history: RunHistory, now_s: float) -> list[Alert]:
    """Returns what is wrong with a run now, since 1970, the most urgent first."""
    raised = [
        Alert(
            rule=rule.name,
            subject=finding.subject,
            severity=finding.severity or rule.severity,
            summary=finding.summary,
            action=rule.action.format(run=history.name, subject=finding.subject),
        )
        for rule in RULES
        if rule.find is not None
        for finding in rule.find(history, now_s)
    ]
    return sorted(raised, key=lambda alert: alert.severity is not Severity.CRITICAL)


def prometheus_rules() -> dict[str, Any]:
    """Returns the rules that Prometheus can check, as the values of its file of rules."""
    rules: list[dict[str, Any]] = []
    for rule in RULES:
        if rule.expression:
            annotations = {"summary": rule.summary, "action": rule.action.format(run="{{ $labels.run }}", subject="")}
            waiting = {"for": rule.lasting} if rule.lasting else {}
            labels = {"severity": str(rule.severity)}
            rules.append(
                {"alert": rule.name, "expr": rule.expression, **waiting, "labels": labels, "annotations": annotations}
            )
    return {"groups": [{"name": "skerry", "rules": rules}]}


def duration_text(duration_s: float) -> str:
    """Returns a time with its unit: 75 is "75 s", 300 is "5 min"."""
    for unit_s, unit in ((86400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if duration_s >= 2 * unit_s:
            return f"{duration_s / unit_s:.0f} {unit}"
    return f"{duration_s:.0f} s" if duration_s >= 10 else f"{duration_s:.1f} s"
