"""Messages of `skerry.v1` from domain values, but for events (`skerry_syncer.run.events`), and values from messages."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Final
from weakref import WeakKeyDictionary

from google.protobuf.duration_pb2 import Duration

from skerry.v1 import exchange_pb2, runs_pb2, types_pb2
from skerry.wire.messages import (
    enum_to_message,
    layouts_to_messages,
    pack_layout,
    policy_to_message,
    tensor_from_message,
    untrained_to_messages,
)
from skerry_syncer.access.caller import calling_learner
from skerry_syncer.errors import SyncerError, bad_request
from skerry_syncer.rounds.membership import LONGEST_S, LearnerReport, MembershipView, participants
from skerry_syncer.run.events import REPORTED_AS_THEY_ARE, fate_message, learner_message, version_message
from skerry_syncer.run.pull import PullPlan
from skerry_syncer.store.log.entries import INITIAL_BASE, AcceptedItem, RunSpec
from skerry_syncer.store.log.state import FragmentState, LearnerState, RunState, VersionState

# Tensors up to which it is said which ones differ where a learner has another number of them than the run.
_MOST_COMPARED: Final = 10_000
# Learners of one answer: a message holds some thousands.
_MOST_LISTED: Final = 256
_REASON_PATTERN: Final = "[A-Z0-9_]{0,64}"
# Of the learners in an answer, beside the run's tensors.
_MOST_LEARNER_BYTES: Final = 2**19
# By the state of an open run: with many tensors it takes long to make.
_CREATED: Final[WeakKeyDictionary[RunState, types_pb2.Run]] = WeakKeyDictionary()


def run_message(state: RunState) -> types_pb2.Run:
    """Returns the run as clients see it."""
    if state not in _CREATED:
        _CREATED[state] = _created(state.spec)
    message = types_pb2.Run(
        policy=policy_to_message(state.policy),
        status=enum_to_message(types_pb2.RunStatus, state.status),
        versions=[
            version_message(layout.name, fragment.newest.version, fragment.newest.digest)
            for layout in state.spec.fragments
            if (fragment := state.fragments[layout.name]).version >= 0
        ],
        position=state.position,
    )
    message.MergeFrom(_CREATED[state])
    return message


def _created(spec: RunSpec) -> types_pb2.Run:
    """Returns what never changes of a run."""
    tensors, fragments = layouts_to_messages(spec.fragments, spec.dtypes)
    message = types_pb2.Run(name=spec.name, uid=spec.uid, tensors=tensors, fragments=fragments)
    message.untrained.extend(untrained_to_messages(spec.untrained))
    message.created_at.FromMilliseconds(round(spec.created_at_unix_s * 1000))
    pack_layout(message)
    return message


def learner_messages(state: RunState, view: MembershipView) -> list[types_pb2.LearnerStatus]:
    """Returns learners as clients see them; of more than 256 those that are live or attached last.

    The versions that they adopted are left out if they are too many to send.
    """

    def rank(known: LearnerState) -> tuple[bool, int]:
        return view.of(known.learner).is_live, known.attached_at

    newest = sorted(state.learners.values(), key=rank, reverse=True)[:_MOST_LISTED]
    contributors = participants(state)
    messages = [
        learner_message(known, view.of(name), is_participating=name in contributors)
        for name, known in sorted((known.learner, known) for known in newest)
    ]
    if sum(message.ByteSize() for message in messages) > _MOST_LEARNER_BYTES:
        for message in messages:
            if message.HasField("report"):
                message.report.ClearField("adopted")
    return messages


def fragment_of(state: RunState, name: str) -> FragmentState:
    """Returns the fragment that a request names.

    Raises:
        SyncerError: FRAGMENT_NOT_FOUND.
    """
    if name not in state.fragments:
        raise SyncerError("FRAGMENT_NOT_FOUND", f"no such fragment in the run. fragment={name[:80]!r}")
    return state.fragments[name]


def check_tensors(spec: RunSpec, tensors: Sequence[types_pb2.Tensor]) -> None:
    """Raises SHAPE_MISMATCH if a learner's tensors are not those of the run."""
    count = sum(len(layout.tensors) for layout in spec.fragments)
    if len(tensors) != count and max(len(tensors), count) > _MOST_COMPARED:
        raise SyncerError("SHAPE_MISMATCH", f"the number of tensors differs. given={len(tensors)}, run={count}")
    try:
        given = {tensor.name: tensor_from_message(tensor).shape for tensor in tensors}
    except ValueError as error:
        raise SyncerError("SHAPE_MISMATCH", str(error)) from error
    wanted = {tensor.name: tensor.shape for layout in spec.fragments for tensor in layout.tensors}
    if given != wanted or len(given) != len(tensors):
        odd = sorted(name for name in given.keys() | wanted.keys() if given.get(name) != wanted.get(name))
        raise SyncerError(
            "SHAPE_MISMATCH",
            f"tensors differ from the run's. (name, given, run)={[(n, given.get(n), wanted.get(n)) for n in odd[:5]]}",
        )


def header_from_message(message: exchange_pb2.PushHeader) -> AcceptedItem:
    """Returns the item that the push is to append, without what its parts bring."""
    return AcceptedItem(
        # Weights that a run begins with are of whom the caller is.
        learner=(message.base_version == INITIAL_BASE and calling_learner()) or message.learner_id,
        session=message.session_id,
        delta=message.delta_id,
        fragment=message.fragment,
        base_version=message.base_version,
        base_digest=message.base_digest.hex(),
        digest="",
        parts=(),
        squared_norms=(),
        step_count=message.step_count,
        token_count=message.token_count,
        last_step=message.last_step,
    )


def report_from_message(message: types_pb2.LearnerReport, fragments: Collection[str]) -> LearnerReport:
    """Returns the report of a learner of a run that has these fragments.

    Raises:
        SyncerError: BAD_REQUEST.
    """
    counts = ("step_count", "token_count", "unsent_step_count", "dropped_step_count")
    for field in (*counts, "sent_bytes", "received_bytes"):
        if getattr(message, field) < 0:
            raise bad_request(f"{field} must not be negative. {field}={getattr(message, field)}")
    if re.fullmatch(_REASON_PATTERN, message.problem) is None:
        raise bad_request(f"problem must be a reason: {_REASON_PATTERN}. problem={message.problem[:80]!r}")
    names = [one.fragment for one in message.adopted[: len(fragments) + 1]]  # there may be millions
    if len(set(names)) != len(names) or any(name not in fragments for name in names):
        raise bad_request("adopted names a fragment twice, or a fragment that the run does not have")
    return LearnerReport(
        step_time_s=_seconds(message.step_time, "step_time"),
        stall_time_s=_seconds(message.stall_time, "stall_time"),
        loss=message.loss if message.HasField("loss") else None,
        adopted=tuple((one.fragment, one.version) for one in message.adopted),
        **{name: getattr(message, name) for name in REPORTED_AS_THEY_ARE},
    )


def _seconds(message: Duration, field: str) -> float:
    seconds = message.seconds + message.nanos / 1e9
    if not 0 <= seconds <= LONGEST_S:
        raise bad_request(f"{field} must be 0 to {LONGEST_S} s. seconds={seconds}")
    return seconds


def plan_message(fragment: FragmentState, plan: PullPlan, position: int) -> exchange_pb2.PullPlan:
    """Returns a plan for the fragment, with the log position that it reflects."""
    return exchange_pb2.PullPlan(
        from_version=plan.from_version,
        target=version_message(fragment.layout.name, plan.target.version, plan.target.digest),
        objects=[
            exchange_pb2.PlanObject(
                name=one.ref.name,
                kind=exchange_pb2.OBJECT_KIND_SNAPSHOT if one.is_snapshot else exchange_pb2.OBJECT_KIND_UPDATE,
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


def version_record(state: RunState, fragment: FragmentState, version: VersionState) -> runs_pb2.VersionRecord:
    """Returns a version with the deltas that made it."""
    record = version.commit
    return runs_pb2.VersionRecord(
        version=version_message(fragment.layout.name, version.version, version.digest),
        position=version.position,
        merged=[] if record is None else [fate_message(state.deltas[member.delta]) for member in record.close.members],
        update_size_bytes=0 if record is None else sum(ref.size_bytes for ref in record.commit.update),
        has_snapshot=bool(version.weights) and all(ref.name not in state.condemned for ref in version.weights),
        is_abandoned=version.is_abandoned,
        source_version=version.source_version,
        participation=0.0 if version.commit is None else version.commit.close.participation,
    )
