"""The leases that one replica keeps of a run's learners, and what learners report; lost without harm.

Every renewal is timed by this replica's own monotonic clock, from when it saw a change; other machines' clocks are
never read. Objects below `learners/<id>` carry the last report and a beat that grows with each, so that another replica
sees change without trusting a time.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Annotated, Final

import msgspec

from skerry_syncer.rounds.membership import LearnerView, MembershipView, participants
from skerry_syncer.store.log.entries import FORMAT, Fate, canonical_json
from skerry_syncer.store.log.state import LearnerState, RunState
from skerry_syncer.store.objects.interface import read_json

# The longest duration that a learner may report. A larger value means a wrong clock, and may not fit a Duration.
LONGEST_S: Final = 365 * 86_400
# What the messages can hold; another replica's advice has no other numbers either.
_Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
_Duration = Annotated[float, msgspec.Meta(ge=0, le=LONGEST_S)]
REASON_PATTERN: Final = "[A-Z0-9_]{0,64}"
# Learners of one answer: a message holds some thousands.
_MOST_LISTED: Final = 256


@dataclass(frozen=True)
class LearnerReport:
    """A learner's own figures; specified in `skerry/v1/types.proto`."""

    step_count: _Int64 = 0
    token_count: _Int64 = 0
    step_time_s: _Duration = 0.0
    loss: float | None = None
    sent_bytes: _Int64 = 0
    received_bytes: _Int64 = 0
    adopted: tuple[tuple[str, _Int64], ...] = ()  # (fragment, version)
    stall_time_s: _Duration = 0.0
    is_flushing: bool = False
    unsent_step_count: _Int64 = 0
    problem: str = ""
    dropped_step_count: _Int64 = 0


@dataclass(frozen=True)
class LearnerRecord:
    """A learner as observers see it."""

    learner: str
    region: str
    is_live: bool
    is_participating: bool
    report: LearnerReport | None
    has_left: bool
    fates: tuple[tuple[Fate, str, int], ...]  # (fate, reason, deltas)


class _Advice(msgspec.Struct):
    """The JSON of `learners/<id>`, but for the learner, which the object's name says."""

    format: int
    session: str
    beat: int
    report: LearnerReport | None


@dataclass
class _Lease:
    """One learner as this replica last heard of it."""

    session: str
    report: LearnerReport | None = None
    renewed_at_s: float | None = None  # None: known from the log alone
    beat: int = 0
    is_unpublished: bool = False  # renewed here since its advice was last written
    advice: bytes = b""  # last read or written


class Leases:
    """The leases of one run on one replica; lost without harm."""

    def __init__(self, started_at_s: float) -> None:
        """Starts with an empty view, which is too young to tell which learners are absent."""
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

    def unpublished(self) -> tuple[tuple[str, bytes], ...]:
        """Returns (learner, advice) of all that was renewed here since the last call."""
        advice = []
        for learner, lease in sorted(self._leases.items()):
            if lease.is_unpublished:
                lease.is_unpublished = False
                lease.advice = _advice(learner, lease)
                advice.append((learner, lease.advice))
        return tuple(advice)

    def hear(self, learner: str, advice: bytes, now_s: float) -> None:
        """Takes in another replica's advice: a change since the last time renews the lease.

        Raises:
            ValueError: not advice that this version reads; nothing was taken in.
        """
        lease = self._leases.get(learner)
        if lease is not None and lease.advice == advice:
            return
        heard = read_json(advice, _Advice)
        if heard.format != FORMAT:
            raise ValueError(f"advice is not readable. learner={learner}")
        is_first = lease is None or lease.session != heard.session
        lease = self._lease(learner, heard.session)
        if not lease.is_unpublished:
            lease.report = heard.report
            lease.beat = heard.beat
        lease.advice = advice
        # A report seen for the first time may be old, so it does not renew the lease; the next change of it does.
        if not is_first or lease.renewed_at_s is not None:
            lease.renewed_at_s = now_s

    def view(self, state: RunState, now_s: float) -> MembershipView:
        """Returns which learners are live now, in the form that the round engine takes."""
        # A learner without a lease at this replica is not live and has no report.
        learners = {
            name: LearnerView(
                is_live=self._is_live(known, state.policy.lease_term_s, now_s),
                step_count=0 if report is None else report.step_count,
                step_time_s=None if report is None or report.step_time_s <= 0 else report.step_time_s,
                token_rate=0.0 if report is None else _token_rate(report),
                is_flushing=report is not None and report.is_flushing,
            )
            for name, known in sorted((name, state.learners[name]) for name in self._leases if name in state.learners)
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
        """Returns the learners that the log knows, in order; of more than 256 those that are live or attached last."""

        def rank(known: LearnerState) -> tuple[bool, int]:
            return self._is_live(known, state.policy.lease_term_s, now_s), known.attached_at

        newest = sorted(state.learners.values(), key=rank, reverse=True)[:_MOST_LISTED]
        return tuple(self.record(state, name, now_s) for name in sorted(known.learner for known in newest))

    def record(self, state: RunState, learner: str, now_s: float) -> LearnerRecord:
        """Returns one learner as observers see it."""
        known = state.learners[learner]
        return LearnerRecord(
            learner=learner,
            region=known.region,
            is_live=self._is_live(known, state.policy.lease_term_s, now_s),
            is_participating=learner in participants(state),
            report=self._report_of(known),
            has_left=known.has_left,
            fates=tuple((fate, why, count) for fate, reasons in known.fates.items() for why, count in reasons.items()),
        )

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


def _token_rate(report: LearnerReport) -> float:
    steps_s = report.step_count * report.step_time_s
    return report.token_count / steps_s if steps_s > 0 else 0.0


def _advice(learner: str, lease: _Lease) -> bytes:
    report = None if lease.report is None else dataclasses.asdict(lease.report)
    if report is not None and report["loss"] is not None and not math.isfinite(report["loss"]):
        report["loss"] = None  # JSON has no number for it
    return canonical_json(
        {"format": FORMAT, "learner": learner, "session": lease.session, "beat": lease.beat, "report": report}
    )
