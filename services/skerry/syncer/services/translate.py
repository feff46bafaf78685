"""Values of the domain to messages of `skerry.v1`, and the few that come in."""

from __future__ import annotations

from collections.abc import Container, Iterable
from datetime import timedelta
from typing import Final

from google.protobuf.duration_pb2 import Duration

from skerry.store.log.entries import Fate, RunStatus
from skerry.store.log.fold import RunState
from skerry.store.log.state import DeltaState, FragmentState, VersionState
from skerry.syncer import events
from skerry.syncer.errors import bad_request
from skerry.syncer.pull import ObjectKind, Plan
from skerry.v1 import exchange_pb2, runs_pb2, types_pb2
from skerry.wire.messages import layouts_to_messages, policy_to_message

_FATES: Final = {
    Fate.PENDING: types_pb2.FATE_PENDING,
    Fate.MERGED: types_pb2.FATE_MERGED,
    Fate.SUPERSEDED: types_pb2.FATE_SUPERSEDED,
    Fate.EXPIRED: types_pb2.FATE_EXPIRED,
    Fate.QUARANTINED: types_pb2.FATE_QUARANTINED,
}
_STATUSES: Final = {
    RunStatus.DRAFT: types_pb2.RUN_STATUS_DRAFT,
    RunStatus.OPEN: types_pb2.RUN_STATUS_OPEN,
    RunStatus.CLOSING: types_pb2.RUN_STATUS_CLOSING,
    RunStatus.CLOSED: types_pb2.RUN_STATUS_CLOSED,
}
_KINDS: Final = {
    ObjectKind.SNAPSHOT: exchange_pb2.OBJECT_KIND_SNAPSHOT,
    ObjectKind.UPDATE: exchange_pb2.OBJECT_KIND_UPDATE,
}

# What a learner may say that a step took: beyond it a clock is wrong, and far beyond no message can say it again.
_LONGEST_S: Final = 365 * 86_400


def duration(seconds: float) -> Duration:
    """Returns seconds as a message."""
    message = Duration()
    message.FromTimedelta(timedelta(seconds=seconds))
    return message


def run_message(state: RunState) -> types_pb2.Run:
    """Returns the run as clients see it."""
    spec = state.spec
    tensors, fragments = layouts_to_messages(spec.fragments, spec.dtypes)
    message = types_pb2.Run(
        name=spec.name,
        uid=spec.uid,
        tensors=tensors,
        fragments=fragments,
        policy=policy_to_message(state.policy),
        status=_STATUSES[state.status],
        versions=[
            version_message(layout.name, newest.version, newest.digest)
            for layout in spec.fragments
            if (fragment := state.fragments[layout.name]).version >= 0
            for newest in (fragment.newest,)
        ],
        position=state.position,
    )
    message.created_at.FromMilliseconds(round(spec.created_at_unix_s * 1000))
    return message


def version_message(fragment: str, version: int, digest: str) -> types_pb2.FragmentVersion:
    """Returns a version with its digest."""
    return types_pb2.FragmentVersion(fragment=fragment, version=version, digest=bytes.fromhex(digest))


def fate_message(record: events.FateRecord) -> types_pb2.DeltaFate:
    """Returns a delta with its fate."""
    return types_pb2.DeltaFate(
        delta_id=record.delta,
        fragment=record.fragment,
        learner_id=record.learner,
        fate=_FATES[record.fate],
        version=record.version,
        reason=record.reason,
        staleness=record.staleness,
        weight_share=record.weight_share,
    )


def delta_message(delta: DeltaState) -> types_pb2.DeltaFate:
    """Returns a delta with the fate that it has now."""
    return fate_message(events.fate_record(delta))


def learner_message(record: events.LearnerRecord) -> types_pb2.LearnerStatus:
    """Returns a learner as observers see it."""
    message = types_pb2.LearnerStatus(
        learner_id=record.learner,
        region=record.region,
        session_id=record.session,
        is_live=record.is_live,
        is_participating=record.is_participating,
    )
    report = record.report
    if report is not None:
        message.report.CopyFrom(
            types_pb2.LearnerReport(
                step_count=report.step_count,
                token_count=report.token_count,
                step_time=duration(report.step_time_s),
                loss=report.loss,
                sent_bytes=report.sent_bytes,
                received_bytes=report.received_bytes,
                adopted=[types_pb2.FragmentVersion(fragment=name, version=number) for name, number in report.adopted],
                stall_time=duration(report.stall_time_s),
            )
        )
    return message


def report_from_message(message: types_pb2.LearnerReport, fragments: Container[str]) -> events.LearnerReport:
    """Returns what a learner of a run of these fragments says of itself.

    Raises:
        SyncerError: BAD_REQUEST.
    """
    for field in ("step_count", "token_count", "sent_bytes", "received_bytes"):
        if getattr(message, field) < 0:
            raise bad_request(f"{field} must not be negative. {field}={getattr(message, field)}")
    names = [one.fragment for one in message.adopted]
    if len(set(names)) != len(names) or any(name not in fragments for name in names):
        raise bad_request("adopted names a fragment twice, or one that the run lacks")
    return events.LearnerReport(
        step_count=message.step_count,
        token_count=message.token_count,
        step_time_s=_seconds(message.step_time, "step_time"),
        loss=message.loss if message.HasField("loss") else None,
        sent_bytes=message.sent_bytes,
        received_bytes=message.received_bytes,
        adopted=tuple((one.fragment, one.version) for one in message.adopted),
        stall_time_s=_seconds(message.stall_time, "stall_time"),
    )


def _seconds(message: Duration, field: str) -> float:
    seconds = message.seconds + message.nanos / 1e9
    if not 0 <= seconds <= _LONGEST_S:
        raise bad_request(f"{field} must be 0 to {_LONGEST_S} s. seconds={seconds}")
    return seconds


def event_message(event: events.Event) -> types_pb2.Event:
    """Returns an event."""
    message = types_pb2.Event(position=event.position)
    match event.kind:
        case events.RoundOpened() as kind:
            message.round_opened.fragment, message.round_opened.version = kind.fragment, kind.version
        case events.DeltaAccepted() as kind:
            message.delta_accepted.CopyFrom(fate_message(kind.fate))
        case events.RoundClosed() as kind:
            message.round_closed.CopyFrom(
                types_pb2.RoundClosed(
                    fragment=kind.fragment, version=kind.version, attempt=kind.attempt, delta_ids=kind.deltas
                )
            )
        case events.VersionCommitted() as kind:
            message.version_committed.CopyFrom(
                types_pb2.VersionCommitted(
                    version=_record_message(kind.version),
                    merged=map(fate_message, kind.merged),
                    update_size_bytes=kind.update_size_bytes,
                    participation=kind.participation,
                    run_step_count=kind.run_step_count,
                )
            )
        case events.FatesDecided() as kind:
            message.fates_decided.fates.extend(map(fate_message, kind.fates))
        case events.PolicyChanged() as kind:
            message.policy_changed.CopyFrom(policy_to_message(kind.policy))
        case events.RolledBack() as kind:
            message.rolled_back.run_step_count = kind.run_step_count
            message.rolled_back.versions.extend(map(_record_message, kind.versions))
            message.rolled_back.source_versions.extend(kind.source_versions)
        case events.StatusChanged() as kind:
            message.status_changed = _STATUSES[kind.status]
        case events.LearnerSeen() as kind:
            message.learner.CopyFrom(learner_message(kind.learner))
        case events.Draining() as kind:
            message.draining.grace.CopyFrom(duration(kind.grace_s))
    return message


def _record_message(record: events.VersionRecord) -> types_pb2.FragmentVersion:
    return version_message(record.fragment, record.version, record.digest)


def plan_message(fragment: FragmentState, plan: Plan, position: int) -> exchange_pb2.PullPlan:
    """Returns a plan."""
    return exchange_pb2.PullPlan(
        from_version=plan.from_version,
        target=version_message(fragment.layout.name, plan.target.version, plan.target.digest),
        objects=[
            exchange_pb2.PlanObject(
                name=one.ref.name,
                kind=_KINDS[one.kind],
                version=one.version,
                first=one.ref.first,
                numel=one.ref.numel,
                size_bytes=one.ref.size_bytes,
                digest=bytes.fromhex(one.ref.digest),
            )
            for one in plan.objects
        ],
        position=position,
    )


def version_records(
    state: RunState, fragment: FragmentState, versions: Iterable[VersionState]
) -> list[runs_pb2.VersionRecord]:
    """Returns versions with who made them."""
    return [_version_record(state, fragment, version) for version in versions]


def _version_record(state: RunState, fragment: FragmentState, version: VersionState) -> runs_pb2.VersionRecord:
    record = version.commit
    return runs_pb2.VersionRecord(
        version=version_message(fragment.layout.name, version.version, version.digest),
        position=version.position,
        merged=[] if record is None else [delta_message(state.deltas[member.delta]) for member in record.close.members],
        update_size_bytes=0 if record is None else sum(ref.size_bytes for ref in record.commit.update),
        has_snapshot=bool(version.weights) and all(ref.name not in state.condemned for ref in version.weights),
        is_abandoned=version.is_abandoned,
        source_version=version.source_version,
    )
