"""Which learners seem to be live, which take part in a round, and which ones the round waits for.

This replica keeps leases of the learners that report to it, and advice about those that report to others. Leases decide
how long a round waits, never what is merged. Every renewal is timed by this replica's own monotonic clock, from when it
saw a change; other machines' clocks are never read. Objects below `learners/<id>` carry the last report and a beat that
grows with each, so that another replica sees change without trusting a time.

`expected_learners` is a pure function of log and leases. Reports are plain values: no protobuf is needed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import chain
from typing import Annotated, Final

import msgspec

from skerry.algorithm.rounds import weight_bounds
from skerry.wire.policy import Policy
from skerry_syncer.store.log.entries import FORMAT, Fate, canonical_json
from skerry_syncer.store.log.state import FragmentState, LearnerState, RunState
from skerry_syncer.store.objects.interface import read_json

# Learners of one answer: each costs 4 us, and a client may ask a hundred times a second.
MOST_LISTED: Final = 256
# Time after the end of its lease at which a learner that brought nothing is forgotten.
_FORGOTTEN_AFTER_S: Final = 600.0
# Of the tokens of the largest learner's delta: a learner that brought less is not waited for.
_SMALL_SHARE: Final = 0.4


@dataclass(frozen=True)
class LearnerView:
    """A learner as this replica sees it through leases: advice, never truth."""

    is_live: bool
    step_count: int = 0  # of its last report
    step_time_s: float | None = None  # moving average that it reports
    token_rate: float = 0.0  # tokens a second, by that average; 0: not known
    is_flushing: bool = False  # it has stopped training and sends its last work


@dataclass(frozen=True)
class MembershipView:
    """Which learners seem to be attached."""

    learners: Mapping[str, LearnerView]
    age_s: float  # how long this replica has been watching the leases

    def is_mature(self, policy: Policy) -> bool:
        """Whether the view is old enough that an absent learner is known to be absent."""
        return self.age_s >= policy.lease_term_s


def expected_learners(state: RunState, fragment: FragmentState, view: MembershipView) -> set[str]:
    """Returns the learners that a round of `fragment` waits for.

    Before the first close these are all learners that are present. Later they are those that contributed to one of the
    last two closes, and those that attached since the first of the two, unless they had attached before and never
    brought anything. Learners that bring few tokens are left out: by their last delta, compared with the largest one,
    or before the first close by the tokens a second that they report. Such a learner contributes early, so its delta is
    mostly in time, and waiting for it would cost the others more than it brings.
    """
    present = present_learners(state, fragment, view)
    if fragment.contributors:
        recent = set[str]().union(*fragment.contributors)
        lately = {name for name in present if state.learners[name].attached_at > fragment.close_positions[0]}
        attached = {name for name in lately if name in fragment.weights or not state.learners[name].was_back}
        expected, brought = present & (recent | attached), fragment.weights
    else:
        expected, brought = present, {name: view.learners[name].token_rate for name in present}
    known = {name: weight for name, weight in brought.items() if name in present and weight}
    bounds = weight_bounds(known, weight_cap=state.policy.weight_cap)
    largest = max((min(weight, bounds[name]) for name, weight in known.items()), default=0.0)
    return {name for name in expected if brought.get(name, largest) >= _SMALL_SHARE * largest}


def present_learners(state: RunState, fragment: FragmentState, view: MembershipView) -> set[str]:
    """Returns the learners that are live or contributed to one of the last closes, and have not left."""
    live = {name for name, learner in view.learners.items() if learner.is_live}
    recent = set[str]().union(*fragment.contributors)
    return {name for name in live | recent if (known := state.learners.get(name)) is not None and not known.has_left}


def participants(state: RunState) -> set[str]:
    """Returns the learners that contributed to one of the last two closes of a fragment."""
    return set[str]().union(*(names for fragment in state.fragments.values() for names in fragment.contributors))


# The longest duration that a learner may report. A larger value means a wrong clock, and may not fit a Duration.
LONGEST_S: Final = 365 * 86_400
# What the messages can hold; another replica's advice has no other numbers either.
_Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
_Duration = Annotated[float, msgspec.Meta(ge=0, le=LONGEST_S)]
REASON_PATTERN: Final = "[A-Z0-9_]{0,64}"
_Reason = Annotated[str, msgspec.Meta(pattern=f"^{REASON_PATTERN}$")]


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
    problem: _Reason = ""
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


class Membership:
    """Leases of one run on one replica; lost without harm."""

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
        """Returns the learners that the log knows, as observers see them, at most `MOST_LISTED`.

        If there are more, live learners come first, then those of which something was merged.
        """
        live = (
            name
            for name in self._leases
            if name in state.learners and self._is_live(state.learners[name], state.policy.lease_term_s, now_s)
        )
        merged = (name for fragment in state.fragments.values() for name in fragment.contributed_at)
        names = set[str]()
        for name in chain(live, merged, state.learners):  # not sorted: there may be a hundred thousand
            names.add(name)
            if len(names) == MOST_LISTED:
                break
        participating = participants(state)
        return tuple(self._record(state, name, now_s, participating) for name in sorted(names))

    def record(self, state: RunState, learner: str, now_s: float) -> LearnerRecord:
        """Returns one learner as observers see it."""
        return self._record(state, learner, now_s, participants(state))

    def _record(self, state: RunState, learner: str, now_s: float, participating: AbstractSet[str]) -> LearnerRecord:
        known = state.learners[learner]
        return LearnerRecord(
            learner=learner,
            region=known.region,
            is_live=self._is_live(known, state.policy.lease_term_s, now_s),
            is_participating=learner in participating,
            report=self._report_of(known),
            has_left=known.has_left,
            fates=tuple((fate, why, count) for fate, reasons in known.fates.items() for why, count in reasons.items()),
        )

    def forget_other(self, state: RunState, learner: str) -> None:
        """Drops the learner's lease if the log has fenced its session."""
        lease = self._leases.get(learner)
        if lease is not None and self._is_fenced(state, learner, lease):
            del self._leases[learner]

    def forget_absent(self, state: RunState, now_s: float) -> list[str]:
        """Drops leases that ended long ago, of learners that brought nothing; returns whose."""
        gone = [
            name
            for name, lease in self._leases.items()
            if (known := state.learners.get(name)) is not None
            and not known.step_count
            and (lease.renewed_at_s or self._started_at_s) + state.policy.lease_term_s + _FORGOTTEN_AFTER_S < now_s
        ]
        for name in gone:
            del self._leases[name]
        return gone

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
