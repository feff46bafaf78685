"""A run as an observer sees it: the state after all events so far, and the bandwidth that learners' reports imply."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from skerry import RunsClient
from skerry.v1 import types_pb2 as v1
from skerry.v1.exchange_pb2 import WatchStart
from skerry.v1.runs_pb2 import GetRunResponse, VersionRecord
from skerry.v1.types_pb2 import DeltaFate, Event, FateCount, LearnerReport, LearnerStatus, RolledBack, VersionCommitted
from skerry.wire.messages import enum_word

_EVENT_COUNT: Final = 10  # the newest events, which a terminal shows
_LOSS_COUNT: Final = 24  # losses that are kept of a learner: the width of its sparkline
_REPORT_COUNT: Final = 6  # reports over which bandwidth is averaged, 10 s or less, because deltas come in bursts


@dataclass
class LearnerView:
    """A learner and its last reports."""

    status: LearnerStatus
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=_LOSS_COUNT))
    told_problem: str = ""  # the last that an event's words had
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
        self.status = now
        if not now.HasField("report"):
            return
        if now.report.HasField("loss") and (not self.losses or self.losses[-1] != now.report.loss):
            self.losses.append(now.report.loss)
        last = self._reports[-1][1] if self._reports else now.report
        if now.report.sent_bytes < last.sent_bytes or now.report.received_bytes < last.received_bytes:
            self._reports.clear()
        self._reports.append((now_s, now.report))

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
    """A fragment, its newest version, and how that was made, where that is known."""

    element_count: int = 0
    version: int = 0
    committed: VersionCommitted | VersionRecord | None = None
    open_version: int | None = None


class WatchState:
    """The run as it is after every message so far."""

    def __init__(self) -> None:
        self.name = ""
        self.status = v1.RUN_STATUS_UNSPECIFIED
        self.position = 0
        self.learners: dict[str, LearnerView] = {}
        self.fragments: dict[str, FragmentView] = {}
        self.events: deque[tuple[int, str]] = deque(maxlen=_EVENT_COUNT)  # positions and words

    def apply(self, message: WatchStart | Event, now_s: float = 0.0) -> str | None:
        """Applies a message that arrived at `now_s`; returns its event in words, None if none is shown."""
        if isinstance(message, WatchStart):
            self._start(message, now_s)
            return None
        self.position = max(self.position, message.position)
        text = self._apply_event(message, now_s)
        if text is not None:
            self.events.append((message.position, text))
        return text

    def apply_version(self, record: VersionRecord) -> None:
        """Applies how a fragment's newest version was made, which the run's state alone does not say."""
        if record.merged:
            self._fragment(record.version.fragment).committed = record

    def staleness(self, learner: LearnerView) -> int | None:
        """Returns how many versions the learner is behind in its stalest fragment; None before its first report."""
        behind = [
            self.fragments[adopted.fragment].version - adopted.version
            for adopted in learner.status.report.adopted
            if adopted.fragment in self.fragments
        ]
        return max(0, *behind) if behind else None

    def _start(self, start: WatchStart, now_s: float) -> None:
        self.name, self.status = start.run.name, start.run.status
        self.position = max(self.position, start.run.position)
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
        view = self.learners.setdefault(status.learner_id, LearnerView(status))
        before = view.status
        view.update(status, now_s)
        is_again = before.HasField("report") and not status.HasField("report")  # a new session has not reported yet
        return is_new or is_again or before.is_live != status.is_live

    def _learner_text(self, status: LearnerStatus, now_s: float) -> str | None:
        """Applies a learner's status and returns what is new in it, in words."""
        if self._update_learner(status, now_s):
            left = "has finished" if status.has_left else "is lost: its lease ran out"
            return f"{status.learner_id} {'attached' if status.is_live else left}"
        view, report = self.learners[status.learner_id], status.report
        if not status.HasField("report") or report.problem == view.told_problem:
            return None
        view.told_problem = report.problem
        if not report.problem:
            return f"{status.learner_id} delivers again"
        return f"{status.learner_id} reports {report.problem}, {report.unsent_step_count} steps unsent"

    def _apply_event(self, event: Event, now_s: float) -> str | None:
        text: str | None = None
        match event.WhichOneof("kind"):
            case "round_opened":
                opened = event.round_opened
                self._fragment(opened.fragment).open_version = opened.version
                text = f"{opened.fragment} opened the round for version {opened.version}"
            case "delta_accepted":
                text = f"{event.delta_accepted.fragment} accepted a delta of {event.delta_accepted.learner_id}"
            case "round_closed":
                closed = event.round_closed
                text = (
                    f"{closed.fragment} closed the round of {len(closed.delta_ids)} deltas for version {closed.version}"
                )
                text += f", attempt {closed.attempt + 1}" if closed.attempt else ""
            case "version_committed":
                text = self._commit(event.version_committed)
            case "fates_decided":
                text = "; ".join(map(_fate_text, event.fates_decided.fates))
            case "policy_changed":
                text = "the policy changed"
            case "rolled_back":
                text = self._roll_back(event.rolled_back)
            case "status_changed":
                self.status = event.status_changed
                text = f"the run is {status_word(self.status)}"
            case "metrics_reported":
                report = event.metrics_reported
                text = f"{report.judge} reports of position {report.position}: "
                text += ", ".join(f"{name} {value:.4g}" for name, value in sorted(report.metrics.items()))
                text += f"; worse than at {report.better_position} by the gate" if report.better_position else ""
            case "learner":
                text = self._learner_text(event.learner, now_s)
        return text

    def _commit(self, committed: VersionCommitted) -> str:
        name, version = committed.version.fragment, committed.version.version
        view = self._fragment(name)
        view.version, view.committed, view.open_version = max(view.version, version), committed, None
        shares = ", ".join(f"{delta.learner_id} {delta.weight_share:.0%}" for delta in committed.merged)
        return f"{name} is at version {version} by {shares or 'no delta'}"

    def _roll_back(self, rolled: RolledBack) -> str:
        for version in rolled.versions:
            view = self._fragment(version.fragment)
            view.version, view.open_version = version.version, None
        return f"rolled back {len(rolled.versions)} fragments to older content"

    def _fragment(self, name: str) -> FragmentView:
        return self.fragments.setdefault(name, FragmentView())


def state_now(client: RunsClient, answer: GetRunResponse) -> WatchState:
    """Returns the state of a run, with how its newest versions were made, which the run alone does not say."""
    state = WatchState()
    state.apply(WatchStart(run=answer.run, learners=answer.learners))
    for fragment in answer.run.fragments:
        for record in islice(client.list_versions(answer.run.name, fragment.name), 1):
            state.apply_version(record)
    return state


def status_word(status: int) -> str:
    """Returns a run's status as a lower-case word, for example "open"."""
    return enum_word(v1.RunStatus.DESCRIPTOR, status)


def learner_state(learner: LearnerStatus) -> str:
    """Returns "finished", "lost", "live", or "participating" if its deltas were in a recent round."""
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
