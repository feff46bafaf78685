"""Judges' reports in the fold, and the gate: which reports fail it, and what the run is to be rolled back to.

Of the reports of the gate's judge that have its metric, those of abandoned or forgotten versions left out, with loss l
(the metric, or minus the metric where higher is better; infinite where it is not finite), a new report r fails if

    l(r) > min over the last N of l(b) + margin        all of them at lower positions than r's

A failed report asks for a roll-back to the position of the best, b. It stays asked for until a roll-back abandons the
failed report's versions, the gate is changed, or the weights are gone and another report fails. So whichever replica
reads the log next can carry it out.
"""

from __future__ import annotations

import math
from typing import Final

from skerry.wire.policy import Gate
from skerry_syncer.store.log.entries import MetricsItem, RunStatus, bytes_digest
from skerry_syncer.store.log.retention import has_weights_at
from skerry_syncer.store.log.state import AskedRollback, Rejection, ReportState, RunState

# Enough for a gate's longest window with four judges.
_REMEMBERED_REPORTS: Final = 256


def check_metrics(state: RunState, item: MetricsItem) -> Rejection | None:
    """A report counts once, and is about a position that the log has."""
    if item.request_id in state.requests:
        return Rejection("ID_REUSED", "request was applied before")
    if state.status is RunStatus.DRAFT:
        return Rejection("RUN_DRAFT", "a draft is not judged")
    if not 1 <= item.position <= state.position:
        return Rejection("VERSION_NOT_FOUND", f"the log has no such position. position={item.position}")
    return None


def apply_metrics(state: RunState, item: MetricsItem) -> None:
    """Remembers the report, and compares it with earlier ones where the policy has a gate for it."""
    state.requests[item.request_id] = state.position
    versions = [fragment.at(item.position) for fragment in state.fragments.values()]
    known = [version for version in versions if version is not None]
    is_known = len(known) == len(versions)
    report = ReportState(
        item,
        step_count=sum(version.step_count for version in known) / len(versions) if is_known else None,
        token_count=sum(version.token_count for version in known) / len(versions) if is_known else None,
        is_abandoned=any(version.is_abandoned for version in known),
    )
    gate = state.policy.gate
    if _counts(gate, report):
        earlier = [other for other in state.reports.values() if _counts(gate, other)]
        if all(other.item.position < item.position for other in earlier):
            _compare(state, gate, report, earlier[-gate.window_count :])
    state.reports[item.request_id] = report
    if len(state.reports) > _REMEMBERED_REPORTS:
        del state.reports[next(iter(state.reports))]


def abandon_reports(state: RunState, target_position: int) -> None:
    """Applies a roll-back to the reports: what is about versions after its target is abandoned."""
    for report in state.reports.values():
        report.is_abandoned |= report.item.position > target_position
    if state.asked_rollback is not None and state.asked_rollback.failed_position > target_position:
        state.asked_rollback = None


def _counts(gate: Gate, report: ReportState) -> bool:
    item = report.item
    is_usable = report.step_count is not None and not report.is_abandoned
    return is_usable and item.judge == gate.judge and gate.metric in item.metrics


def _compare(state: RunState, gate: Gate, report: ReportState, window: list[ReportState]) -> None:
    best = min(reversed(window), key=lambda other: _loss(gate, other), default=None)  # the last of equal ones
    if best is None or not _loss(gate, report) > _loss(gate, best) + gate.margin:
        return
    report.better_position = best.item.position
    is_possible = state.status is not RunStatus.CLOSED and has_weights_at(state, report.better_position)
    asked = state.asked_rollback
    is_asked = asked is not None and has_weights_at(state, asked.target_position)  # else it can't be carried out
    if gate.rolls_back and is_possible and not is_asked:
        state.asked_rollback = AskedRollback(
            request_id=bytes_digest(f"skerry.gate.v1\0{state.spec.uid}\0{report.item.request_id}".encode())[:32],
            failed_position=report.item.position,
            target_position=report.better_position,
            author=f"gate: judge={gate.judge}, metric={gate.metric}",
        )


def _loss(gate: Gate, report: ReportState) -> float:
    value = report.item.metrics[gate.metric]
    return math.inf if value is None else -value if gate.higher_is_better else value
