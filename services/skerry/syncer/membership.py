"""Who seems to be there: leases of learners that report to this replica, and advice about those that report to others.

Membership decides how long a round waits, never what is merged. Every renewal is timed by this replica's own monotonic
clock, from when it saw something change; other machines' clocks are never read. Objects below `learners/<id>` carry the
last report and a beat that grows with each, so that another replica sees change without trusting a time.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass

from skerry.store.log.entries import FORMAT, canonical_json
from skerry.store.log.state import LearnerState, RunState
from skerry.syncer.participation import LearnerView, MembershipView
from skerry.syncer.reports import LearnerRecord, LearnerReport


@dataclass
class _Lease:
    """One learner as this replica last heard of it."""

    session: str
    report: LearnerReport | None = None
    renewed_at_s: float | None = None  # None: known from the log alone
    beat: int = 0
    is_unpublished: bool = False  # renewed here since its advice was last written
    advice: bytes = b""  # last read or written


class Membership:
    """Leases of one run on one replica; lost without harm."""

    def __init__(self, started_at_s: float) -> None:
        """Starts with an empty view, which is too young to say who is absent."""
        self._started_at_s = started_at_s
        self._leases: dict[str, _Lease] = {}

    def renew(self, learner: str, session: str, now_s: float, report: LearnerReport | None = None) -> None:
        """Says that the learner attached, pushed or reported here."""
        lease = self._lease(learner, session)
        lease.renewed_at_s = now_s
        lease.beat += 1
        lease.is_unpublished = True
        if report is not None:
            lease.report = report

    def end(self, learner: str, session: str) -> None:
        """Says that the learner left for good."""
        lease = self._leases.get(learner)
        if lease is not None and lease.session == session:
            lease.renewed_at_s = None
            lease.is_unpublished = False

    def unpublished(self) -> tuple[tuple[str, bytes], ...]:
        """Returns (learner, advice) of all that was renewed here since the last call."""
        found = []
        for learner, lease in sorted(self._leases.items()):
            if lease.is_unpublished:
                lease.is_unpublished = False
                lease.advice = _advice(learner, lease)
                found.append((learner, lease.advice))
        return tuple(found)

    def hear(self, learner: str, advice: bytes, now_s: float) -> None:
        """Takes in another replica's advice: a change since the last time renews the lease.

        Raises:
            ValueError: not advice that this version reads; nothing was taken in.
        """
        lease = self._leases.get(learner)
        if lease is not None and lease.advice == advice:
            return
        values = json.loads(advice)
        if not isinstance(values, dict) or values.get("format") != FORMAT:
            raise ValueError(f"advice is not readable. learner={learner}")
        is_first = lease is None or lease.session != values["session"]
        lease = self._lease(learner, values["session"])
        if not lease.is_unpublished:
            lease.report = _report(values["report"])
            lease.beat = values["beat"]
        lease.advice = advice
        # The first sight says nothing of when it was written: it is no renewal, its next change is.
        if not is_first or lease.renewed_at_s is not None:
            lease.renewed_at_s = now_s

    def view(self, state: RunState, now_s: float) -> MembershipView:
        """Returns who is live now, as the round engine wants it."""
        learners = {
            name: LearnerView(
                is_live=self._is_live(known, state.policy.lease_term_s, now_s),
                step_count=0 if report is None else report.step_count,
                step_time_s=None if report is None or report.step_time_s <= 0 else report.step_time_s,
            )
            for name, known in sorted(state.learners.items())
            for report in (self._report_of(known),)
        }
        return MembershipView(learners, age_s=now_s - self._started_at_s)

    def next_change_s(self, state: RunState, now_s: float) -> float | None:
        """Returns when the view will change by itself: a lease runs out, or it becomes old enough; None: never."""
        term_s = state.policy.lease_term_s
        changes = [lease.renewed_at_s + term_s for lease in self._leases.values() if lease.renewed_at_s is not None]
        changes.append(self._started_at_s + term_s)
        return min((at_s for at_s in changes if at_s > now_s), default=None)

    def records(self, state: RunState, now_s: float) -> tuple[LearnerRecord, ...]:
        """Returns every learner that the log knows, as observers see it."""
        return tuple(self.record(state, name, now_s) for name in sorted(state.learners))

    def record(self, state: RunState, learner: str, now_s: float) -> LearnerRecord:
        """Returns one learner as observers see it."""
        known = state.learners[learner]
        return LearnerRecord(
            learner=learner,
            region=known.region,
            session=known.session,
            is_live=self._is_live(known, state.policy.lease_term_s, now_s),
            is_participating=any(
                learner in contributors for f in state.fragments.values() for contributors in f.contributors
            ),
            report=self._report_of(known),
        )

    def forget_others(self, state: RunState) -> None:
        """Drops leases of sessions that the log has fenced, so that nothing grows with re-attachments."""
        for learner in [name for name, lease in self._leases.items() if self._is_fenced(state, name, lease)]:
            del self._leases[learner]

    def _lease(self, learner: str, session: str) -> _Lease:
        lease = self._leases.get(learner)
        if lease is None or lease.session != session:
            lease = self._leases[learner] = _Lease(session)
        return lease

    def _is_live(self, known: LearnerState, term_s: float, now_s: float) -> bool:
        lease = self._leases.get(known.learner)
        if lease is None or lease.session != known.session or known.has_left or lease.renewed_at_s is None:
            return False
        return now_s < lease.renewed_at_s + term_s

    def _report_of(self, known: LearnerState) -> LearnerReport | None:
        lease = self._leases.get(known.learner)
        return None if lease is None or lease.session != known.session else lease.report

    @staticmethod
    def _is_fenced(state: RunState, learner: str, lease: _Lease) -> bool:
        known = state.learners.get(learner)
        return known is not None and lease.session != known.session and lease.session in known.sessions


def _advice(learner: str, lease: _Lease) -> bytes:
    report = None if lease.report is None else dataclasses.asdict(lease.report)
    if report is not None and report["loss"] is not None and not math.isfinite(report["loss"]):
        report["loss"] = None  # JSON has no number for it
    return canonical_json(
        {"format": FORMAT, "learner": learner, "session": lease.session, "beat": lease.beat, "report": report}
    )


def _report(values: Mapping[str, object] | None) -> LearnerReport | None:
    if values is None:
        return None
    fields: dict[str, object] = dict(values)
    adopted = fields.pop("adopted", ())
    pairs = tuple((str(name), int(version)) for name, version in adopted)  # type: ignore[attr-defined]
    return LearnerReport(adopted=pairs, **fields)  # type: ignore[arg-type]
