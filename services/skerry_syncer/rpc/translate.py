"""Messages of `skerry.v1` from domain values, but for events (`skerry_syncer.run.events`), and values from messages."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Final, TypeVar
from weakref import WeakKeyDictionary

import msgspec
from google.protobuf.message import Message

from skerry.v1 import exchange_pb2, runs_pb2, types_pb2
from skerry.wire.messages import (
    enum_to_message,
    layouts_to_messages,
    pack_layout,
    policy_to_message,
    to_values,
    untrained_to_messages,
)
from skerry_syncer.access.caller import calling_learner
from skerry_syncer.errors import SyncerError, bad_request
from skerry_syncer.rounds.membership import LearnerReport, MembershipView, participants
from skerry_syncer.run.events import fate_message, learner_message, timestamp, version_message
from skerry_syncer.run.pull import PullPlan
from skerry_syncer.store.log.entries import INITIAL_BASE, AcceptedItem, RunSpec
from skerry_syncer.store.log.state import Contribution, FragmentState, LearnerState, RunState, VersionState

_Message = TypeVar("_Message", bound=Message)
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
    message.created_at.CopyFrom(timestamp(spec.created_at_unix_s))
    pack_layout(message)
    return message


def learner_messages(state: RunState, view: MembershipView) -> list[types_pb2.LearnerStatus]:
    """Returns learners as clients see them, by id; if they don't fit, first those that are live or attached last."""

    def rank(known: LearnerState) -> tuple[bool, int]:
        return view.of(known.learner).is_live, known.attached_at

    contributors = participants(state)
    messages = (
        learner_message(known, view.of(known.learner), is_participating=known.learner in contributors)
        for known in sorted(state.learners.values(), key=rank, reverse=True)
    )
    return sorted(fitting(messages, _MOST_LEARNER_BYTES), key=lambda message: message.learner_id)


def contribution_messages(state: RunState) -> list[runs_pb2.Contribution]:
    """Returns what was contributed to the newest versions, the largest share of the weight first."""
    newest = [fragment.newest for fragment in state.fragments.values() if fragment.version != INITIAL_BASE]
    by_key: dict[tuple[str, str], list[Contribution]] = {}
    for row in (row for version in newest for row in version.contributions):
        by_key.setdefault((row.learner, row.organisation), []).append(row)
    round_count = sum(row.weight for rows in by_key.values() for row in rows if row.learner)  # 1 a round in all
    messages = [
        runs_pb2.Contribution(
            learner_id=learner,
            organisation=organisation,
            token_count=sum(row.token_count for row in rows) / len(newest),
            step_count=sum(row.step_count for row in rows) / len(newest),
            weight_share=sum(row.weight for row in rows) / round_count if round_count else 0.0,
            version_count=sum(row.version_count for row in rows),
        )
        for (learner, organisation), rows in by_key.items()
    ]
    return sorted(messages, key=lambda each: (-each.weight_share, each.learner_id, each.organisation))


def fitting(messages: Iterable[_Message], size_bytes: int) -> list[_Message]:
    """Returns as many of the first messages as have that size together, and at least one if there are any."""
    first, used_bytes = list[_Message](), 0
    for message in messages:
        used_bytes += message.ByteSize()
        if first and used_bytes > size_bytes:
            break
        first.append(message)
    return first


def check_tensors(spec: RunSpec, tensors: Sequence[types_pb2.Tensor]) -> None:
    """Raises SHAPE_MISMATCH if a learner's tensors are not those of the run."""
    theirs = {tensor.name: tuple(tensor.shape) for tensor in tensors}
    ours = {tensor.name: tensor.shape for layout in spec.fragments for tensor in layout.tensors}
    if theirs != ours or len(theirs) != len(tensors):
        odd = sorted(name for name in theirs.keys() | ours.keys() if theirs.get(name) != ours.get(name))
        shown = [(name[:80], theirs.get(name), ours.get(name)) for name in odd[:5]]
        raise SyncerError("SHAPE_MISMATCH", f"tensors differ from the run's. (name, learner's, run's)={shown}")


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
    names = [version.fragment for version in message.adopted[: len(fragments) + 1]]  # there may be millions
    if len(set(names)) != len(names) or any(name not in fragments for name in names):
        raise bad_request("adopted names a fragment twice, or a fragment that the run does not have")
    adopted = [(version.fragment, version.version) for version in message.adopted]
    try:
        return msgspec.convert({**to_values(message), "adopted": adopted}, LearnerReport)
    except msgspec.ValidationError as error:
        raise bad_request(f"the report has a value that is not legal. cause={error}") from error


def plan_message(fragment: FragmentState, plan: PullPlan, position: int) -> exchange_pb2.PullPlan:
    """Returns a plan for the fragment, with the log position that it reflects."""
    return exchange_pb2.PullPlan(
        from_version=plan.from_version,
        target=version_message(fragment.layout.name, plan.target.version, plan.target.digest),
        objects=[
            exchange_pb2.PlanObject(
                name=planned.ref.name,
                kind=exchange_pb2.OBJECT_KIND_SNAPSHOT if planned.is_snapshot else exchange_pb2.OBJECT_KIND_UPDATE,
                version=planned.version,
                first=planned.ref.first,
                numel=planned.ref.numel,
                size_bytes=planned.ref.size_bytes,
                digest=bytes.fromhex(planned.ref.digest),
            )
            for planned in plan.objects
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
