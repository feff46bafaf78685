"""The events that followers of a run receive, as messages of `skerry.v1`.

Events of the log follow from its entries alone (`events_of`): every replica sends the same ones, and a replay of the
past sends them again. Events without an entry (a round that opens, a learner's report) carry the position at
which they were sent.

Each follower has a bounded stream of them, so a slow one costs the syncer neither time nor memory.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Final

from google.protobuf.timestamp_pb2 import Timestamp

from skerry.v1 import types_pb2 as v1
from skerry.v1.types_pb2 import Event
from skerry.wire.messages import enum_to_message, fill, policy_to_message
from skerry_syncer.errors import SyncerError
from skerry_syncer.rounds.membership import LearnerReport, LearnerView
from skerry_syncer.store.log.entries import (
    AcceptedItem,
    ClosedItem,
    CommittedItem,
    EjectionItem,
    Entry,
    Fate,
    LeftItem,
    MetricsItem,
    PolicyItem,
    RollbackItem,
    SessionItem,
    SnapshotItem,
    StatusItem,
)
from skerry_syncer.store.log.state import DeltaState, LearnerState, Outcome, ReportState, RunState


def events_of(state: RunState, entry: Entry, outcomes: Iterable[Outcome]) -> list[v1.Event]:
    """Returns the events of `entry`, whose items had these `outcomes`; `state` is the fold up to and with the entry."""
    events = []
    written_at = timestamp(entry.written_at_unix_s)
    for outcome in outcomes:
        if outcome.rejection is not None:
            continue
        event = v1.Event(position=entry.position, time=written_at)
        _fill(event, state, outcome)
        if event.WhichOneof("kind"):
            events.append(event)
        unmerged = [fate_message(delta) for delta in outcome.decided if delta.fate is not Fate.MERGED]
        if unmerged:
            decided = v1.FatesDecided(fates=unmerged)
            events.append(v1.Event(position=entry.position, time=written_at, fates_decided=decided))
    return events


def _fill(event: v1.Event, state: RunState, outcome: Outcome) -> None:
    """Sets the kind to what an admitted item did, apart from the fates that it decided; some items set none."""
    match outcome.item:
        case AcceptedItem() as item:  # a later item of the same entry may have decided its fate already
            event.delta_accepted.CopyFrom(fate_message(DeltaState(item, event.position)))
        case ClosedItem() as item:
            closed = event.round_closed
            closed.fragment, closed.version, closed.attempt = item.fragment, item.version, item.attempt
            closed.delta_ids.extend(member.delta for member in item.members)
        case CommittedItem() as item:
            record = state.fragments[item.fragment].versions[item.version].commit
            assert record is not None  # the item was admitted
            committed = event.version_committed
            _fill_version(committed, item, outcome.decided)
            committed.update_size_bytes = sum(ref.size_bytes for ref in item.update)
            committed.participation = record.close.participation
            committed.run_step_count, committed.run_token_count = state.step_count, state.token_count
        case SnapshotItem() as item if outcome.decided:  # the initial weights became version 0
            _fill_version(event.version_committed, item, outcome.decided)
            event.version_committed.participation = 1.0
        case PolicyItem() as item:
            event.policy_changed.CopyFrom(policy_to_message(item.policy))
        case RollbackItem() as item:
            rolled_back = event.rolled_back
            rolled_back.versions.extend(
                version_message(target.fragment, target.version, target.digest) for target in item.fragments
            )
            rolled_back.source_versions.extend(target.source_version for target in item.fragments)
            rolled_back.run_step_count, rolled_back.run_token_count = state.step_count, state.token_count
            rolled_back.target_position, rolled_back.author = item.target_position, item.author
        case MetricsItem(request_id=request_id) if request_id in state.reports:
            event.metrics_reported.CopyFrom(report_message(state.reports[request_id]))
        case EjectionItem() as item:
            changed = event.ejection_changed
            changed.learner_id, changed.is_ejected, changed.author = item.learner, item.is_ejected, item.author
        case StatusItem() as item:
            event.status_changed = enum_to_message(v1.RunStatus, item.status)
        case SessionItem() as item:
            event.learner.learner_id, event.learner.region, event.learner.is_live = item.learner, item.region, True
            event.learner.organisation = item.organisation
        case LeftItem() as item:
            event.learner.learner_id, event.learner.has_left = item.learner, True
        case _:
            pass


def _fill_version(
    committed: v1.VersionCommitted, item: CommittedItem | SnapshotItem, decided: Iterable[DeltaState]
) -> None:
    committed.version.CopyFrom(version_message(item.fragment, item.version, item.digest))
    committed.merged.extend(fate_message(delta) for delta in decided if delta.fate is Fate.MERGED)


def timestamp(unix_s: float) -> Timestamp:
    """Returns seconds since 1970 as a message, to the millisecond."""
    message = Timestamp()
    message.FromMilliseconds(round(unix_s * 1000))
    return message


def version_message(fragment: str, version: int, digest: str) -> v1.FragmentVersion:
    """Returns a version with its digest."""
    return v1.FragmentVersion(fragment=fragment, version=version, digest=bytes.fromhex(digest))


def fate_message(delta: DeltaState) -> v1.DeltaFate:
    """Returns a delta with the fate that it has now."""
    return v1.DeltaFate(
        delta_id=delta.item.delta,
        fragment=delta.item.fragment,
        learner_id=delta.item.learner,
        fate=enum_to_message(v1.Fate, delta.fate),
        version=delta.version,
        reason=delta.reason,
        staleness=delta.staleness,
        weight_share=delta.weight_share,
        step_count=delta.item.step_count,
        token_count=delta.item.token_count,
        size_bytes=sum(part.size_bytes for part in delta.item.parts),
    )


def report_message(report: ReportState) -> v1.MetricsReport:
    """Returns a judge's report with what the gate says of it."""
    item = report.item
    return v1.MetricsReport(
        position=item.position,
        judge=item.judge,
        metrics={name: math.nan if value is None else value for name, value in item.metrics.items()},
        author=item.author,
        run_step_count=report.step_count,
        run_token_count=report.token_count,
        is_abandoned=report.is_abandoned,
        better_position=report.better_position,
    )


def learner_message(known: LearnerState, seen: LearnerView, *, is_participating: bool) -> v1.LearnerStatus:
    """Returns a learner as observers see it."""
    message = v1.LearnerStatus(
        learner_id=known.learner,
        region=known.region,
        is_live=seen.is_live,
        is_participating=is_participating,
        has_left=known.has_left,
        is_ejected=known.ejected_at > 0,
        organisation=known.organisation,
        fates=[
            v1.FateCount(fate=enum_to_message(v1.Fate, fate), reason=reason, delta_count=count)
            for fate, reasons in known.fates.items()
            for reason, count in reasons.items()
        ],
    )
    if seen.report != LearnerReport():
        values = {name: value for name, value in vars(seen.report).items() if name != "adopted"}
        fill(message.report, values).adopted.extend(
            v1.FragmentVersion(fragment=name, version=number) for name, number in seen.report.adopted
        )
    return message


# Memory that a queued event takes beside its own bytes, roughly: followers share the message.
_OVERHEAD_BYTES: Final = 512


class EventStream:
    """A queue of events for one follower, bounded in bytes; `put` never blocks, and an ended stream has a reason."""

    def __init__(self, limit_bytes: int, *, learner: str = "", session: str = "", caller: str = "") -> None:
        """Holds up to `limit_bytes` of events that were not taken yet; of an observer, who has no learner's session.

        `caller` is the learner that an observer's certificate names.
        """
        self.learner = learner
        self.caller = caller or learner
        self.session = session
        self._limit_bytes = limit_bytes
        self._size_bytes = 0
        self._queue: asyncio.Queue[Event | Exception | None] = asyncio.Queue()  # None: the stream ends normally
        self._has_ended = False

    def put(self, event: Event) -> None:
        """Adds an event; if the queue grows past its bound, the stream ends with TOO_SLOW."""
        if self._has_ended:
            return
        self._size_bytes += _OVERHEAD_BYTES + event.ByteSize()
        if self._size_bytes <= self._limit_bytes:
            self._queue.put_nowait(event)
            return
        while not self._queue.empty():
            self._queue.get_nowait()
        message = "events were not read as fast as they happen; follow again from the last position seen"
        self.end(SyncerError("TOO_SLOW", f"{message}. limit_bytes={self._limit_bytes}", retry_after_s=1.0))

    def skip(self) -> None:
        """Drops what is queued, but for the stream's end."""
        while not self._has_ended and not self._queue.empty():
            self._queue.get_nowait()
            self._size_bytes = 0

    def end(self, error: Exception | None = None) -> None:
        """Ends the stream after the queued events, with `error` or normally; only the first call has an effect."""
        if not self._has_ended:
            self._has_ended = True
            self._queue.put_nowait(error)

    async def get(self) -> Event | None:
        """Returns the next event, or None when the stream has ended normally.

        Raises:
            SyncerError: the stream ended with this error; likewise any other error that ended it.
        """
        item = await self._queue.get()
        if isinstance(item, Event):
            self._size_bytes -= _OVERHEAD_BYTES + item.ByteSize()
            return item
        self._queue.put_nowait(item)  # the end stays
        if item is not None:
            raise item
        return None


class Followers:
    """The streams of one run on one replica: of attached learners and of observers."""

    def __init__(self, limit_bytes: int) -> None:
        """Gives each follower a stream of at most `limit_bytes`."""
        self._limit_bytes = limit_bytes
        self._streams: dict[EventStream, None] = {}
        self._closed: Exception | None = None

    def __len__(self) -> int:
        return len(self._streams)

    @contextmanager
    def following(self, learner: str = "", session: str = "", *, caller: str = "") -> Iterator[EventStream]:
        """Yields a stream of the events that are sent inside the context, to a learner's session or to an observer."""
        stream = EventStream(self._limit_bytes, learner=learner, session=session, caller=caller)
        self._streams[stream] = None
        if self._closed is not None:
            stream.end(self._closed)
        try:
            yield stream
        finally:
            del self._streams[stream]

    def send(self, event: Event) -> None:
        """Queues the event for every observer, and for the learners that it concerns."""
        learners = _addressees(event)
        for stream in self._streams:
            if not stream.learner or learners is None or stream.learner in learners:
                stream.put(event)

    @property
    def have_observers(self) -> bool:
        """Whether anybody but learners follows the run."""
        return any(not stream.learner for stream in self._streams)

    def end(self, error: Exception, ends: Callable[[EventStream], object] = lambda _: True) -> None:
        """Ends the streams for which `ends` holds."""
        for stream in filter(ends, self._streams):
            stream.end(error)

    def close(self, error: Exception) -> None:
        """Ends all streams, and every stream that is opened later."""
        self._closed = error
        self.end(error)


def _addressees(event: Event) -> Collection[str] | None:
    """Returns the ids of the learners that an event is sent to; None: to all."""
    match event.WhichOneof("kind"):
        case "learner" | "round_closed" | "metrics_reported" | "ejection_changed":
            return ()
        case "delta_accepted":
            return (event.delta_accepted.learner_id,)
        case "fates_decided":
            return {fate.learner_id for fate in event.fates_decided.fates}
        case _:
            return None


@asynccontextmanager
async def running(work: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """Runs `work`, which must not raise, beside the context and cancels it at the context's end."""
    # A task group would wrap the context's own errors, and would raise in a generator's caller between two items.
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
