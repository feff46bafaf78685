"""Who seems to be there, who takes part in a round, and whom it waits for.

This replica holds leases of the learners that report to it, and advice about those that report to others. Leases decide
how long a round waits, never what is merged. Every renewal is timed by this replica's own monotonic clock, from when it
saw something change; other machines' clocks are never read. Objects below `learners/<id>` carry the last report and a
beat that grows with each, so that another replica sees change without trusting a time.

`weigh`, `expected_learners` and `closed_round` are pure functions of log and leases. The formulas are
`skerry.algorithm`'s; here is which learners and deltas they are about. Reports are plain values: no protobuf is needed.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from skerry.algorithm.rounds import (
    Contribution,
    delta_weight,
    outage_length,
    participation,
    round_length,
    share_of_length,
    staleness_damping,
)
from skerry.store.log.entries import FORMAT, AcceptedItem, ClosedItem, Decided, Member, canonical_json
from skerry.store.log.state import DeltaState, FragmentState, LearnerState, RunState
from skerry.wire.policy import Policy

# Rounds that a run goes on before a learner that brings nothing no longer counts as working.
_ABSENT_AFTER_ROUNDS: Final = 1.5
# Of the tokens of the largest learner's delta: a learner that brought less is not waited for.
_SMALL_SHARE: Final = 0.4


@dataclass(frozen=True)
class LearnerView:
    """A learner as this replica sees it through leases: advice, never truth."""

    is_live: bool
    step_count: int = 0  # of its last report
    step_time_s: float | None = None  # moving average that it reports
    token_rate: float = 0.0  # tokens a second, by that average; 0: not known


@dataclass(frozen=True)
class MembershipView:
    """Which learners seem to be attached."""

    learners: Mapping[str, LearnerView]
    age_s: float  # how long this replica has been watching the leases

    def is_mature(self, policy: Policy) -> bool:
        """Whether the view is old enough that an absent learner is known to be absent."""
        return self.age_s >= policy.lease_term_s


def weigh(delta: DeltaState, fragment: FragmentState, policy: Policy) -> Member:
    """Returns the delta's place in a set that closes now: its damped weight, and its staleness in versions.

    Staleness damps by rounds and not by versions: where learners are merged one by one each makes a version, and an
    answer that took a moment is not stale for that.
    """
    rounds = fragment.rounds_behind(delta.item.base_version, policy.inner_step_count)
    weight = _weight(delta.item, policy) * staleness_damping(rounds, exponent=policy.staleness_exponent)
    return Member(delta.item.delta, weight, fragment.version - delta.item.base_version)


def expected_learners(state: RunState, fragment: FragmentState, view: MembershipView) -> set[str]:
    """Returns whom a round of `fragment` waits for.

    Before the first close that is everybody; then who contributed to the last two closes, or attached since the first
    of them. A learner whose last delta held few tokens is not waited for; before the first close, one that reports few
    tokens a second or none. It contributes early, so its delta is mostly there in time, and it brings less than it
    costs everybody to have the answer later.
    """
    present = _present_learners(state, fragment, view)
    if fragment.contributors:
        recent = set[str]().union(*fragment.contributors)
        attached = {name for name in present if state.learners[name].attached_at > fragment.close_positions[0]}
        expected, brought = present & (recent | attached), fragment.weights
    else:
        expected, brought = present, {name: view.learners[name].token_rate for name in present}
    largest = max((weight for name, weight in brought.items() if name in present), default=0.0)
    return {name for name in expected if brought.get(name, largest) >= _SMALL_SHARE * largest}


def closed_round(
    state: RunState,
    fragment: FragmentState,
    view: MembershipView,
    members: Sequence[Member],
    *,
    attempt: int,
    decided: tuple[Decided, ...],
) -> ClosedItem:
    """Returns the entry that freezes `members` for the fragment's next version, with participation and length.

    Without members it makes the round void.
    """
    items = [state.deltas[member.delta].item for member in members]
    step_counts, full = [item.step_count for item in items], state.policy.inner_step_count
    length = round_length(step_counts, [member.weight for member in members], inner_step_count=full)
    rho = _participation(state, fragment, view, members, length) if members else 1.0
    missed = fragment.missed_step_count((item.learner for item in items), fragment.version)
    after_outage = outage_length(step_counts, participation=rho, missed_step_count=missed, inner_step_count=full)
    return ClosedItem(
        fragment=fragment.layout.name,
        version=fragment.version + 1,
        attempt=attempt,
        members=tuple(members),
        participation=rho,
        decided=decided,
        length=after_outage or length,
    )


def _present_learners(state: RunState, fragment: FragmentState, view: MembershipView) -> set[str]:
    live = {name for name, learner in view.learners.items() if learner.is_live}
    recent = set[str]().union(*fragment.contributors)
    return {name for name in live | recent if (known := state.learners.get(name)) is not None and not known.has_left}


def _working_learners(state: RunState, fragment: FragmentState, view: MembershipView) -> set[str]:
    """Returns whose share of the work a round of `fragment` lacks without them.

    A learner is taken to work until the run has gone on `_ABSENT_AFTER_ROUNDS` without anything of it, so that a dead
    one damps the others' steps for a round or two, and not for as long as its lease seems to live.
    """
    horizon = _ABSENT_AFTER_ROUNDS * state.policy.inner_step_count
    return {
        name
        for name in _present_learners(state, fragment, view)
        if fragment.newest.step_count
        < horizon + max(fragment.contributed_at.get(name, 0.0), state.learners[name].attached_at_step)
    }


def _participation(
    state: RunState, fragment: FragmentState, view: MembershipView, members: Sequence[Member], length: float
) -> float:
    """Returns rho of a round of that length.

    An absent learner counts with what it brought last; before its first delta, with what the steps that it reports
    would bring, at the contributors' weight for a round.
    """
    contributed, brought_by = [], set()
    for member in members:
        item = state.deltas[member.delta].item
        weight = _weight(item, state.policy)
        damping = member.weight / weight if weight else 0.0
        contributed.append(Contribution(share_of_length(weight, item.step_count, length), damping))
        brought_by.add(item.learner)
    mean = sum(delta.weight for delta in contributed) / len(brought_by)
    absent = []
    for name in sorted(_working_learners(state, fragment, view) - brought_by):
        if name in fragment.weights:
            weight, step_count = fragment.weights[name], fragment.step_counts[name]
        else:
            step_count = view.learners[name].step_count if name in view.learners else 0
            weight = mean * min(1.0, step_count / length)
        absent.append(share_of_length(weight, step_count, length))
    return participation(contributed, absent)


def _weight(item: AcceptedItem, policy: Policy) -> float:
    return delta_weight(
        item.token_count, item.step_count, inner_step_count=policy.inner_step_count, weight_cap=policy.weight_cap
    )


@dataclass(frozen=True)
class LearnerReport:
    """A learner's own figures; specified in `skerry/v1/types.proto`."""

    step_count: int = 0
    token_count: int = 0
    step_time_s: float = 0.0
    loss: float | None = None
    sent_bytes: int = 0
    received_bytes: int = 0
    adopted: tuple[tuple[str, int], ...] = ()  # (fragment, version)
    stall_time_s: float = 0.0


@dataclass(frozen=True)
class LearnerRecord:
    """A learner as observers see it."""

    learner: str
    region: str
    session: str
    is_live: bool
    is_participating: bool
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
                token_rate=0.0 if report is None else _token_rate(report),
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


def _report(values: Mapping[str, object] | None) -> LearnerReport | None:
    if values is None:
        return None
    fields: dict[str, object] = dict(values)
    adopted = fields.pop("adopted", ())
    pairs = tuple((str(name), int(version)) for name, version in adopted)  # type: ignore[attr-defined]
    return LearnerReport(adopted=pairs, **fields)  # type: ignore[arg-type]
