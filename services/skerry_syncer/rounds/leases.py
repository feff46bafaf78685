"""The leases that one replica keeps of a run's learners, and what learners report; lost without harm.

Every renewal is timed by this replica's own monotonic clock, from when it saw a change; other machines' clocks are
never read. Objects below `learners/<id>` carry the last report, a new one with each change, so that another replica
sees change without trusting a time.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from skerry_syncer.rounds.membership import LearnerReport, LearnerView, MembershipView
from skerry_syncer.store.log.entries import FORMAT
from skerry_syncer.store.log.state import LearnerState, RunState
from skerry_syncer.store.objects.interface import read_json


class _Advice(msgspec.Struct):
    """The JSON of an object below `learners/<id>`."""

    format: int
    session: str
    report: LearnerReport


@dataclass
class _Lease:
    """One learner as this replica last heard of it."""

    session: str
    report: LearnerReport = field(default_factory=LearnerReport)
    renewed_at_s: float | None = None  # None: known from the log alone
    is_unpublished: bool = False  # renewed here since its advice was last written


class Leases:
    """The leases of one run on one replica."""

    def __init__(self, started_at_s: float) -> None:
        """Starts with an empty view, which is too young to tell which learners are absent."""
        self._started_at_s = started_at_s
        self._leases: dict[str, _Lease] = {}

    def renew(self, learner: str, session: str, now_s: float, report: LearnerReport | None = None) -> None:
        """Says that the learner attached, pushed or reported here."""
        lease = self._lease(learner, session)
        lease.renewed_at_s = now_s
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
        renewed = [(learner, lease) for learner, lease in sorted(self._leases.items()) if lease.is_unpublished]
        for _, lease in renewed:
            lease.is_unpublished = False
        return tuple(
            (learner, msgspec.json.encode(_Advice(FORMAT, lease.session, lease.report))) for learner, lease in renewed
        )

    def hear(self, learner: str, advice: bytes, now_s: float) -> None:
        """Takes in another replica's newest advice, of which each object is to be given once.

        Raises:
            ValueError: not advice that this version reads; nothing was taken in.
        """
        heard = read_json(advice, _Advice)
        if heard.format != FORMAT:
            raise ValueError(f"advice has a format that this version does not read. format={heard.format}")
        known = self._leases.get(learner)
        lease = self._lease(learner, heard.session)
        if not lease.is_unpublished:
            lease.report = heard.report
        # A report seen for the first time may be old, so it does not renew the lease; the next one does.
        if lease is known:
            lease.renewed_at_s = now_s

    def view(self, state: RunState, now_s: float) -> MembershipView:
        """Returns which learners are live now, in the form that the round engine takes."""
        known = [state.learners[name] for name in sorted(self._leases) if name in state.learners]
        return MembershipView(
            {learner.learner: self.seen(state, learner, now_s) for learner in known}, now_s - self._started_at_s
        )

    def seen(self, state: RunState, learner: LearnerState, now_s: float) -> LearnerView:
        """Returns one learner as this replica sees it now."""
        lease = self._leases.get(learner.learner)
        if lease is None or lease.session != learner.session:
            return LearnerView()
        is_renewed = lease.renewed_at_s is not None and now_s < lease.renewed_at_s + state.policy.lease_term_s
        return LearnerView(is_renewed and not learner.has_left, lease.report)

    def next_change_s(self, state: RunState, now_s: float) -> float | None:
        """Returns when the view will change by itself: a lease runs out, or it becomes old enough; None: never."""
        term_s = state.policy.lease_term_s
        changes = [lease.renewed_at_s + term_s for lease in self._leases.values() if lease.renewed_at_s is not None]
        changes.append(self._started_at_s + term_s)
        return min((at_s for at_s in changes if at_s > now_s), default=None)

    def _lease(self, learner: str, session: str) -> _Lease:
        lease = self._leases.get(learner)
        if lease is None or lease.session != session:
            lease = self._leases[learner] = _Lease(session)
        return lease
