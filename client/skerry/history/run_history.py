"""What happened in a run: its learners, versions, rounds, losses and traffic, folded from the messages of a watch.

One model feeds the terminal table, the console's pages, the report and the alerts. It holds nothing that another
watch from position 1 would not give again, except what is in no log: learners' reports, openings of rounds, and that a
replica drained or failed. It is bounded: of what is old it keeps less, or nothing.

Times are those of the log, whose writers' clocks may differ. How long ago something was is told by the observer's clock
alone, except of what happened before it watched.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, NamedTuple

from skerry import RunsClient
from skerry.exchange.session import policy_of
from skerry.history.series import Point, Series
from skerry.v1 import types_pb2 as v1
from skerry.v1.exchange_pb2 import WatchStart
from skerry.v1.runs_pb2 import GetRunResponse, VersionRecord
from skerry.v1.types_pb2 import (
    DeltaFate,
    EjectionChanged,
    Event,
    FateCount,
    LearnerReport,
    LearnerStatus,
    MetricsReport,
    RolledBack,
    RoundClosed,
    VersionCommitted,
)
from skerry.wire.messages import enum_word
from skerry.wire.policy import Policy

_EVENT_COUNT: Final = 20_000  # of the newest
_REPORT_COUNT: Final = 6  # reports over which bandwidth is averaged, 10 s or less, because deltas come in bursts
_VERSION_COUNT: Final = 100_000  # of the newest, of all fragments
_DETAILED_COUNT: Final = 2_000  # newest versions of which each delta is known; ListVersions has those of the others
_REPORTED_COUNT: Final = 1_000
_ADOPTED_COUNT: Final = 300  # newest versions of which the time is known at which a learner told of them
_NAMED_COUNT: Final = 5  # of many learners, the text of an event names those with most weight
_RATE_SPAN_S: Final = 300.0  # of tokens a second
# Shorter rounds count as this long, so that no alert comes and goes faster than a person can read it.
_LEAST_ROUND_S: Final = 2.5
_SHARE_COUNT: Final = 8  # a learner's share of the weight is that of the run's last so many versions


class EventText(NamedTuple):
    """An event in words."""

    position: int
    time_s: float
    kind: str
    text: str


@dataclass(slots=True)
class VersionView:
    """A version of a fragment, and the round that made it; times are None where the watch began later."""

    fragment: str
    version: int
    position: int
    committed_at_s: float = 0.0
    opened_at_s: float | None = None  # its first delta, or when the syncer opened the round if that is earlier
    closed_at_s: float | None = None
    delta_count: int = 0
    staleness: int = 0  # of its stalest delta
    update_size_bytes: int = 0
    participation: float = 0.0
    until: int | None = None  # position of the next version of its fragment
    source_version: int = -1  # whose content it has, where a roll-back made it
    is_abandoned: bool = False
    deltas: Sequence[DeltaFate] = ()  # of the newest versions only
    came_at_s: Mapping[str, float] = field(default_factory=dict)  # likewise, by delta id

    @property
    def last_delta(self) -> DeltaFate | None:
        """The delta of its round that came last; None if that is not known."""
        timed = [delta for delta in self.deltas if delta.delta_id in self.came_at_s]
        return max(timed, key=lambda delta: self.came_at_s[delta.delta_id], default=None)

    @property
    def waited_s(self) -> float | None:
        """Seconds from the round's opening to its close."""
        return None if self.opened_at_s is None or self.closed_at_s is None else self.closed_at_s - self.opened_at_s


@dataclass
class LearnerView:
    """A learner, its last reports, and what the run took of it."""

    status: LearnerStatus
    is_whole: bool = True  # whether the history has all that it did
    losses: Series = field(default_factory=Series)
    told_problem: str = ""  # the last that an event's words had
    last_words: str = ""  # of the newest event that is about it
    heard_at_s: float | None = None  # its last report's or entry's time
    attached_at_s: float | None = None  # while it is attached
    trained_s: float = 0.0  # of earlier attachments
    taken_step_count: int = 0  # since the history begins, also before it was started again
    merged_steps: Counter[str] = field(default_factory=Counter)  # likewise, by fragment
    sent_bytes: int = 0  # of its accepted deltas
    merged_at_s: dict[str, float] = field(default_factory=dict)  # by fragment: when a version last had its delta
    shares: deque[float] = field(default_factory=lambda: deque(maxlen=_SHARE_COUNT))
    adopted_at_s: dict[tuple[str, int], float] = field(default_factory=dict)  # when it told of a version
    _reports: deque[tuple[float, LearnerReport]] = field(default_factory=lambda: deque(maxlen=_REPORT_COUNT))

    def update(self, status: LearnerStatus, now_s: float) -> None:
        """Applies a report; a learner that has restarted counts from zero again."""
        now = LearnerStatus()
        now.CopyFrom(status)
        if status.has_left and not status.HasField("report"):  # the log's event, which has no figures
            now.CopyFrom(self.status)
            now.is_live, now.has_left = False, True
        elif not status.fates:  # likewise
            now.fates.extend(self.status.fates)
        self.count_time(now_s, is_live=now.is_live)
        self.status, self.heard_at_s = now, now_s
        if not now.HasField("report"):
            return
        report = now.report
        last_loss = self.losses.last
        if report.HasField("loss") and (last_loss is None or last_loss.step_count != report.step_count):
            self.losses.add(Point(now_s, report.step_count, report.token_count, report.loss))
        for adopted in report.adopted:
            self.adopted_at_s.setdefault((adopted.fragment, adopted.version), now_s)
        while len(self.adopted_at_s) > _ADOPTED_COUNT:
            del self.adopted_at_s[next(iter(self.adopted_at_s))]
        last = self._reports[-1][1] if self._reports else report
        before = 0 if self.is_whole and not self._reports else last.step_count
        self.taken_step_count += max(0, report.step_count - before)
        if report.sent_bytes < last.sent_bytes or report.received_bytes < last.received_bytes:
            self._reports.clear()
        self._reports.append((now_s, report))

    def count_time(self, now_s: float, *, is_live: bool) -> None:
        """Counts the time for which the learner is attached, of which a watch of the past hears the end first."""
        if is_live:
            self.attached_at_s = min(now_s, self.attached_at_s or now_s)
        elif self.attached_at_s is not None:
            self.trained_s += max(0.0, now_s - self.attached_at_s)
            self.attached_at_s = None

    def attached_s(self, now_s: float) -> float:
        """Returns the seconds for which the learner was attached, as far as the watch knows."""
        return self.trained_s + (0.0 if self.attached_at_s is None else max(0.0, now_s - self.attached_at_s))

    @property
    def share(self) -> float | None:
        """Mean share of the weight of the last versions that were made since it is known; None before the first."""
        return sum(self.shares) / len(self.shares) if self.shares else None

    @property
    def bits_per_s(self) -> tuple[float, float] | None:
        """Mean bandwidth of deltas and updates; before the second report that of all steps, None if that is unknown."""
        if not self._reports:
            return None
        (began_s, first), (now_s, last) = self._reports[0], self._reports[-1]
        if now_s <= began_s:
            began_s, first = now_s - last.step_count * last.step_time.ToNanoseconds() / 1e9, LearnerReport()
        if now_s <= began_s:
            return None
        moved_bytes = last.sent_bytes - first.sent_bytes, last.received_bytes - first.received_bytes
        return 8 * moved_bytes[0] / (now_s - began_s), 8 * moved_bytes[1] / (now_s - began_s)


@dataclass
class FragmentView:
    """A fragment, its newest version, and its round."""

    element_count: int = 0
    version: int = 0
    open_version: int | None = None
    opened_at_s: float | None = None  # of the round that gathers or merges
    closed_at_s: float | None = None
    open_since_s: float | None = None  # likewise, when it was heard of
    heard_at_s: float = 0.0  # of the newest version
    usual_s: float = 0.0  # moving average of the time between versions
    usual_round_s: float = 0.0  # and of that between a round's opening and its version
    last: VersionView | None = None  # the newest version, once its making was told

    def open(self, time_s: float, heard_at_s: float) -> None:
        """Opens the round, if it is not open."""
        if self.opened_at_s is None:
            self.opened_at_s, self.open_since_s = time_s, heard_at_s


class RunHistory:
    """The run as it is after every message so far."""

    def __init__(self, told_after: int = 0) -> None:
        self.name = ""
        self.status = v1.RUN_STATUS_UNSPECIFIED
        self.position = 0
        self.policy = Policy()
        self.now_s = 0.0  # of the last message
        self.step_count = 0.0  # the run's progress in inner steps
        self.token_count = 0.0
        self.learners: dict[str, LearnerView] = {}
        self.fragments: dict[str, FragmentView] = {}
        self.events: deque[EventText] = deque(maxlen=_EVENT_COUNT)
        self.progress = Series()  # value: versions so far
        self.metrics: dict[tuple[str, str], Series] = {}  # judges' reports, by judge and metric
        self.reports: deque[MetricsReport] = deque(maxlen=_REPORTED_COUNT)  # of judges, the newest
        self.version_count = 0
        self.versions: deque[VersionView] = deque(maxlen=_VERSION_COUNT)  # in the order of the log
        self.applied_position = 0
        self.told_after = told_after  # position after which the watch tells the past; 0: it does not
        self._began_at = 0  # position of the first start, if the past is not told from the run's beginning
        self._started_at = 0  # position of the newest start: events up to it are the past, told again
        self._heard_at_s = 0.0  # the newest message: when it came, or when it happened if it tells the past again
        self._accepted_at_s: dict[str, float] = {}  # by delta that is pending

    @property
    def parameter_count(self) -> int:
        """Trained parameters."""
        return sum(fragment.element_count for fragment in self.fragments.values())

    @property
    def is_current(self) -> bool:
        """Whether the past is told up to where the run was when the watch began."""
        return self.applied_position >= self._started_at > 0

    @property
    def is_whole(self) -> bool:
        """Whether the watch tells the past from the run's beginning."""
        return self.told_after <= 1

    @property
    def is_judged(self) -> bool:
        """Whether every judge that has reported has done so of the newest version."""
        newest = self.versions[-1].position if self.versions else 0
        return all(
            position >= newest for position in {report.judge: report.position for report in self.reports}.values()
        )

    def apply(self, message: WatchStart | Event, now_s: float = 0.0) -> str | None:
        """Applies a message that arrived at `now_s`, since 1970; returns its event in words, None if none is shown."""
        if isinstance(message, WatchStart):
            self.now_s = max(self.now_s, now_s)
            self._start(message, now_s)
            return None
        self.position = max(self.position, message.position)
        self.applied_position = max(self.applied_position, message.position)
        time_s = message.time.ToMilliseconds() / 1000 if message.HasField("time") else now_s
        is_past = message.position <= self._started_at and not message.learner.HasField("report")
        self._heard_at_s = time_s if is_past else now_s or time_s
        self.now_s = max(self.now_s, self._heard_at_s)
        text, learner_id = self._apply_event(message, time_s)
        if text is not None:
            kind = message.WhichOneof("kind") or ""
            self.events.append(EventText(message.position, time_s, kind, text))
            if learner_id in self.learners:
                self.learners[learner_id].last_words = text
        return text

    def note(self, text: str, now_s: float) -> None:
        """Adds an event that no message tells: what became of the replica that told of the run."""
        self.events.append(EventText(self.position, now_s, "replica", text))

    def apply_version(self, record: VersionRecord) -> None:
        """Applies how a fragment's newest version was made, which the run's state alone does not say."""
        if record.merged:
            self._fragment(record.version.fragment).last = version_view(record, record.position)

    def apply_report(self, report: MetricsReport) -> None:
        """Applies what a judge reported before now, of which the run's state does not say when."""
        self._report(report, self.now_s)

    def staleness(self, learner: LearnerView) -> int | None:
        """Returns how many versions the learner is behind in its stalest fragment; None before its first report."""
        behind = [
            self.fragments[adopted.fragment].version - adopted.version
            for adopted in learner.status.report.adopted
            if adopted.fragment in self.fragments
        ]
        return max(0, *behind) if behind else None

    def missed_rounds(self, learner: LearnerView) -> tuple[str, float]:
        """Returns the fragment that went on longest without a learner, and for how many of the learner's own rounds.

        A round of its own takes it H steps, or as long as the fragment's versions usually take if that is longer, and
        counts as 2.5 s at least.
        """
        if learner.attached_at_s is None:
            return "", 0.0
        own_s = self.policy.inner_step_count * learner.status.report.step_time.ToMilliseconds() / 1000
        missed = [
            (
                (fragment.heard_at_s - max(learner.merged_at_s.get(name, 0.0), learner.attached_at_s)) / length_s,
                name,
            )
            for name, fragment in self.fragments.items()
            if fragment.last and (length_s := max(own_s, fragment.usual_s, _LEAST_ROUND_S))
        ]
        count, name = max(missed, default=(0.0, ""))
        return name, count

    def tokens_per_s(self, now_s: float) -> float | None:
        """Returns the tokens that the run merged a second over the last minutes; None before two versions."""
        last, first = self.progress.last, self.progress.last_before(now_s - _RATE_SPAN_S)
        if last is None or first is None or now_s <= first.time_s or len(self.progress) < 2:
            return None
        return (last.token_count - first.token_count) / (now_s - first.time_s)

    def versions_per_hour(self, now_s: float) -> float | None:
        """Returns the versions of all fragments that were made an hour, over the last hour."""
        last, first = self.progress.last, self.progress.last_before(now_s - 3600)
        if last is None or first is None or now_s <= first.time_s:
            return None
        return 3600 * (last.value - first.value) / (now_s - first.time_s)

    def goodput(self) -> float | None:
        """Returns steps merged / steps taken since the history begins, of all that report; None before both."""
        reporting = [view for view in self.learners.values() if view.taken_step_count]
        taken = sum(view.taken_step_count for view in reporting)
        merged = sum(sum(view.merged_steps.values()) / len(self.fragments) for view in reporting)
        return min(1.0, merged / taken) if taken and merged else None

    def learner_counts(self) -> tuple[int, int, int]:
        """Returns how many learners are live, expected (they did not leave) and participating."""
        statuses = [view.status for view in self.learners.values()]
        return (
            sum(status.is_live for status in statuses),
            sum(not status.has_left for status in statuses),
            sum(status.is_live and status.is_participating for status in statuses),
        )

    def _start(self, start: WatchStart, now_s: float) -> None:
        self.name, self.status = start.run.name, start.run.status
        self.policy = policy_of(start.run.policy, Policy())
        self.position = max(self.position, start.run.position)
        self._started_at = start.run.position
        self._began_at = self._began_at or (0 if self.is_whole else start.run.position)
        element_counts = {tensor.name: math.prod(tensor.shape) for tensor in start.run.tensors}
        for fragment in start.run.fragments:
            self._fragment(fragment.name).element_count = sum(element_counts[name] for name in fragment.tensors)
        for version in start.run.versions:
            view = self._fragment(version.fragment)
            # Versions only grow, but the replica that answers after a broken stream may lag behind the last one.
            view.version = max(view.version, version.version)
        for learner in start.learners:
            self._update_learner(learner, now_s)

    def _update_learner(self, status: LearnerStatus, now_s: float) -> bool:
        """Applies a learner's status; returns whether it came, left or attached anew."""
        is_new = status.learner_id not in self.learners
        view = self.learners.setdefault(status.learner_id, LearnerView(status, self.is_whole))
        before = view.status
        view.update(status, now_s)
        is_again = before.HasField("report") and not status.HasField("report")  # a new session has not reported yet
        return is_new or is_again or before.is_live != status.is_live

    def _learner_text(self, status: LearnerStatus, now_s: float, *, is_past: bool) -> str | None:
        """Applies a learner's status and returns what is new in it, in words.

        What the log says of the past is not what the learner does now, which the start said.
        """
        left = "has finished" if status.has_left else "is lost: its lease ran out"
        change = f"{status.learner_id} {'attached' if status.is_live else left}"
        if is_past and not status.HasField("report") and (status.is_live or status.has_left):
            if (known := self.learners.get(status.learner_id)) is not None:
                known.count_time(now_s, is_live=status.is_live)
            return change
        if self._update_learner(status, now_s):
            return change
        view, report = self.learners[status.learner_id], status.report
        if not status.HasField("report") or report.problem == view.told_problem:
            return None
        view.told_problem = report.problem
        if not report.problem:
            return f"{status.learner_id} delivers again"
        return f"{status.learner_id} reports {report.problem}, {report.unsent_step_count} steps unsent"

    def _apply_event(self, event: Event, time_s: float) -> tuple[str | None, str]:
        """Applies an event; returns it in words, and the learner that it is about."""
        text: str | None = None
        learner_id = ""
        match event.WhichOneof("kind"):
            case "round_opened":
                opened = event.round_opened
                view = self._fragment(opened.fragment)
                view.open_version = opened.version
                view.open(time_s, self._heard_at_s)
                text = f"{opened.fragment} opened the round for version {opened.version}"
            case "delta_accepted":
                text, learner_id = self._accept(event.delta_accepted, time_s), event.delta_accepted.learner_id
            case "round_closed":
                text = self._close(event.round_closed, time_s)
            case "version_committed":
                text = self._commit(event.version_committed, event.position, time_s)
            case "fates_decided":
                fates = event.fates_decided.fates
                text, learner_id = self._decide(fates), fates[0].learner_id if fates else ""
            case "policy_changed":
                self.policy = policy_of(event.policy_changed, Policy())
                text = "the policy changed"
            case "rolled_back":
                text = self._roll_back(event.rolled_back, event.position, time_s)
            case "status_changed":
                self.status = event.status_changed
                text = f"the run is {status_word(self.status)}"
            case "metrics_reported":
                text = self._report(event.metrics_reported, time_s)
            case "ejection_changed":
                learner_id = event.ejection_changed.learner_id
                text = self._eject(event.ejection_changed, is_past=event.position <= self._started_at)
            case "learner":
                learner_id = event.learner.learner_id
                text = self._learner_text(event.learner, self._heard_at_s, is_past=event.position <= self._started_at)
        return text, learner_id

    def _accept(self, delta: DeltaFate, time_s: float) -> str:
        self._accepted_at_s[delta.delta_id] = time_s
        self._fragment(delta.fragment).open(time_s, self._heard_at_s)
        if delta.learner_id in self.learners:
            self.learners[delta.learner_id].sent_bytes += delta.size_bytes
        return f"{delta.fragment} accepted a delta of {delta.learner_id}"

    def _close(self, closed: RoundClosed, time_s: float) -> str:
        self._fragment(closed.fragment).closed_at_s = time_s
        text = f"{closed.fragment} closed the round of {len(closed.delta_ids)} deltas for version {closed.version}"
        return text + (f", attempt {closed.attempt + 1}" if closed.attempt else "")

    def _decide(self, fates: Iterable[DeltaFate]) -> str:
        for fate in fates:
            self._accepted_at_s.pop(fate.delta_id, None)
        return "; ".join(map(_fate_text, fates))

    def _commit(self, committed: VersionCommitted, position: int, time_s: float) -> str:
        name, version = committed.version.fragment, committed.version.version
        view = self._fragment(name)
        view.version, view.open_version = max(view.version, version), None
        made = version_view(committed, position)
        made.committed_at_s, made.opened_at_s, made.closed_at_s = time_s, view.opened_at_s, view.closed_at_s
        known = self._accepted_at_s
        made.came_at_s = {delta.delta_id: known.pop(delta.delta_id) for delta in made.deltas if delta.delta_id in known}
        self._add_version(view, made)
        if committed.run_token_count:
            self.step_count, self.token_count = committed.run_step_count, committed.run_token_count
        self._progress()
        if not version:
            return f"{name} has its initial weights"
        for learner in self.learners.values():
            learner.shares.append(0.0)
        for delta in committed.merged:
            if delta.learner_id in self.learners:
                learner = self.learners[delta.learner_id]
                if position > self._began_at:
                    learner.merged_steps[name] += delta.step_count
                learner.shares[-1] += delta.weight_share
                learner.merged_at_s[name] = self._heard_at_s
        heaviest = sorted(committed.merged, key=lambda delta: -delta.weight_share)[:_NAMED_COUNT]
        shares = [f"{delta.learner_id} {delta.weight_share:.0%}" for delta in heaviest]
        if more_count := len(committed.merged) - len(heaviest):
            shares.append(f"{more_count} more")
        return f"{name} is at version {version} by {', '.join(shares) or 'no delta'}"

    def _add_version(self, fragment: FragmentView, version: VersionView) -> None:
        if fragment.last is not None and version.version > 1:
            fragment.usual_s = _averaged(fragment.usual_s, self._heard_at_s - fragment.heard_at_s)
        if fragment.open_since_s is not None:
            fragment.usual_round_s = _averaged(fragment.usual_round_s, self._heard_at_s - fragment.open_since_s)
        fragment.heard_at_s = self._heard_at_s
        if fragment.last is not None:
            fragment.last.until = version.position
        fragment.last = version
        fragment.opened_at_s = fragment.open_since_s = fragment.closed_at_s = None
        self.version_count += 1
        self.versions.append(version)
        if len(self.versions) > _DETAILED_COUNT:
            old = self.versions[-1 - _DETAILED_COUNT]
            old.deltas, old.came_at_s = (), {}

    def _progress(self) -> None:
        self.progress.add(Point(self._heard_at_s, self.step_count, self.token_count, self.version_count))

    def _roll_back(self, rolled: RolledBack, position: int, time_s: float) -> str:
        for target, source_version in zip(rolled.versions, rolled.source_versions, strict=True):
            for version in self.versions:
                if version.fragment == target.fragment and version.version > source_version:
                    version.is_abandoned = True
            view = self._fragment(target.fragment)
            view.version, view.open_version = target.version, None
            made = VersionView(target.fragment, target.version, position, time_s, source_version=source_version)
            self._add_version(view, made)
        self.step_count, self.token_count = rolled.run_step_count, rolled.run_token_count
        self._progress()
        author = f" by {rolled.author}" if rolled.author else ""
        count = len(rolled.versions)
        return f"rolled back {count} fragments to their content at position {rolled.target_position}{author}"

    def _report(self, report: MetricsReport, time_s: float) -> str:
        self.reports.append(report)
        for metric, value in sorted(report.metrics.items()):
            point = Point(time_s, report.run_step_count, report.run_token_count, value)
            if report.HasField("run_step_count"):  # else the run has forgotten where that was
                self.metrics.setdefault((report.judge, metric), Series()).add(point)
        text = f"{report.judge} reports of position {report.position}: "
        text += ", ".join(f"{name} {value:.4g}" for name, value in sorted(report.metrics.items()))
        return text + (f"; worse than at {report.better_position} by the gate" if report.better_position else "")

    def _eject(self, changed: EjectionChanged, *, is_past: bool) -> str:
        view = self.learners.get(changed.learner_id)
        if view is not None and not is_past:  # the start said what it is now
            view.status.is_ejected = changed.is_ejected
            if changed.is_ejected:
                view.status.is_live, view.status.has_left = False, True
                view.count_time(self._heard_at_s, is_live=False)
        author = f" by {changed.author}" if changed.author else ""
        return f"{changed.learner_id} was {'ejected' if changed.is_ejected else 'readmitted'}{author}"

    def _fragment(self, name: str) -> FragmentView:
        return self.fragments.setdefault(name, FragmentView())


def _averaged(usual_s: float, span_s: float) -> float:
    return usual_s + 0.2 * (max(0.0, span_s) - usual_s) if usual_s else max(0.0, span_s)


def version_view(made: VersionCommitted | VersionRecord, position: int) -> VersionView:
    """Returns a version as the contract has it, without the times of its round."""
    return VersionView(
        fragment=made.version.fragment,
        version=made.version.version,
        position=position,
        delta_count=len(made.merged),
        staleness=max((delta.staleness for delta in made.merged), default=0),
        update_size_bytes=made.update_size_bytes,
        participation=made.participation,
        deltas=made.merged,
    )


def history_now(client: RunsClient, answer: GetRunResponse) -> RunHistory:
    """Returns the state of a run, with how its newest versions were made and what judges reported of it."""
    history = RunHistory()
    history.apply(WatchStart(run=answer.run, learners=answer.learners))
    for fragment in answer.run.fragments:
        for record in islice(client.list_versions(answer.run.name, fragment.name), 1):
            history.apply_version(record)
    for report in answer.reports:
        history.apply_report(report)
    return history


def status_word(status: int) -> str:
    """Returns a run's status as a lower-case word, for example "open"."""
    return enum_word(v1.RunStatus.DESCRIPTOR, status)


def learner_state(learner: LearnerStatus) -> str:
    """Returns "ejected", "finished", "lost", "live", or "participating" if its deltas were in a recent round."""
    if learner.is_ejected:
        return "ejected"
    if not learner.is_live:
        return "finished" if learner.has_left else "lost"
    return "participating" if learner.is_participating else "live"


def unmerged_text(fates: Iterable[FateCount]) -> str:
    """Returns how many of a learner's deltas were not merged, and why; empty if all were."""
    counts = {(fate.fate, fate.reason): fate.delta_count for fate in fates}
    others = sorted(((count, *cause) for cause, count in counts.items() if cause[0] != v1.FATE_MERGED), reverse=True)
    if not others:
        return ""
    causes = ", ".join(f"{count} {_fate_words(fate, reason)}" for count, fate, reason in others)
    return f"{sum(count for count, *_ in others)} of {sum(counts.values())} deltas were not merged: {causes}"


def _fate_text(fate: DeltaFate) -> str:
    return f"{fate.fragment}: a delta of {fate.learner_id} is {_fate_words(fate.fate, fate.reason)}"


def _fate_words(fate: int, reason: str) -> str:
    name = enum_word(v1.Fate.DESCRIPTOR, fate)
    return f"{name} ({reason})" if reason else name
