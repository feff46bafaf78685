"""What `RunsClient` returns: runs, learners, versions and events as frozen dataclasses.

A record has the name and the fields of its message in `skerry.v1`, where the fields are specified. Durations are
seconds, under names that end in `_s`; enum values are lower-case words; what a message leaves out is None.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from functools import cache
from types import NoneType
from typing import Any, TypeVar

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from skerry.errors import RefusedError
from skerry.v1 import types_pb2
from skerry.wire import Codec, Compressor
from skerry.wire.messages import policy_from_message, unpack_layout
from skerry.wire.policy import Policy
from skerry.wire.untrained import UntrainedTensor

R = TypeVar("R")


class RunStatus(StrEnum):
    """The life of a run."""

    UNSPECIFIED = "unspecified"
    DRAFT = "draft"
    OPEN = "open"
    CLOSING = "closing"
    CLOSED = "closed"


class Fate(StrEnum):
    """What became of an accepted delta."""

    UNSPECIFIED = "unspecified"
    PENDING = "pending"
    MERGED = "merged"
    SUPERSEDED = "superseded"
    EXPIRED = "expired"
    QUARANTINED = "quarantined"


@dataclass(frozen=True)
class Tensor:
    """One tensor of a run's model."""

    name: str
    shape: tuple[int, ...] = ()
    dtype: str = ""


@dataclass(frozen=True)
class Fragment:
    """One fragment of a run's plan: the names of its tensors, in the order of its flat vector."""

    name: str
    tensors: tuple[str, ...] = ()


@dataclass(frozen=True)
class FragmentVersion:
    """One version of one fragment."""

    fragment: str
    version: int
    digest: bytes = b""


@dataclass(frozen=True)
class Run:
    """A run at one position of its log."""

    name: str
    uid: str = ""
    tensors: tuple[Tensor, ...] = ()
    fragments: tuple[Fragment, ...] = ()
    policy: Policy = field(default_factory=Policy)
    status: RunStatus = RunStatus.UNSPECIFIED
    versions: tuple[FragmentVersion, ...] = ()
    position: int = 0
    created_at: datetime | None = None
    untrained: tuple[UntrainedTensor, ...] = ()


@dataclass(frozen=True)
class LearnerReport:
    """What a learner reports of itself."""

    step_count: int = 0
    token_count: int = 0
    step_time_s: float | None = None
    loss: float | None = None
    sent_bytes: int = 0
    received_bytes: int = 0
    adopted: tuple[FragmentVersion, ...] = ()
    stall_time_s: float | None = None
    is_flushing: bool = False
    unsent_step_count: int = 0
    problem: str = ""
    dropped_step_count: int = 0


@dataclass(frozen=True)
class FateCount:
    """How many deltas of a learner had a fate."""

    fate: Fate = Fate.UNSPECIFIED
    reason: str = ""
    delta_count: int = 0


@dataclass(frozen=True)
class LearnerStatus:
    """A learner as observers see it."""

    learner_id: str
    region: str = ""
    is_live: bool = False
    is_participating: bool = False
    report: LearnerReport | None = None
    has_left: bool = False
    fates: tuple[FateCount, ...] = ()


@dataclass(frozen=True)
class RunView:
    """A run and its learners, live or not."""

    run: Run
    learners: tuple[LearnerStatus, ...] = ()


@dataclass(frozen=True)
class DeltaFate:
    """One delta and its fate."""

    delta_id: str = ""
    fragment: str = ""
    learner_id: str = ""
    fate: Fate = Fate.UNSPECIFIED
    version: int = 0
    reason: str = ""
    staleness: int = 0
    weight_share: float = 0.0


@dataclass(frozen=True)
class VersionRecord:
    """One version with its origin."""

    version: FragmentVersion
    position: int = 0
    merged: tuple[DeltaFate, ...] = ()
    update_size_bytes: int = 0
    has_snapshot: bool = False
    is_abandoned: bool = False
    source_version: int = -1
    participation: float = 0.0


@dataclass(frozen=True)
class RoundOpened:
    """A round has begun to gather deltas."""

    fragment: str
    version: int


@dataclass(frozen=True)
class RoundClosed:
    """A round's set of deltas was frozen."""

    fragment: str
    version: int
    attempt: int = 0
    delta_ids: tuple[str, ...] = ()


@dataclass(frozen=True)
class VersionCommitted:
    """A new version exists."""

    version: FragmentVersion
    merged: tuple[DeltaFate, ...] = ()
    update_size_bytes: int = 0
    participation: float = 0.0
    run_step_count: float = 0.0


@dataclass(frozen=True)
class FatesDecided:
    """Deltas met a fate other than being merged."""

    fates: tuple[DeltaFate, ...] = ()


@dataclass(frozen=True)
class RolledBack:
    """Fragments got older content under new version numbers."""

    versions: tuple[FragmentVersion, ...] = ()
    source_versions: tuple[int, ...] = ()
    run_step_count: float = 0.0


@dataclass(frozen=True)
class Draining:
    """The replica that answers is going away."""

    grace_s: float | None = None


@dataclass(frozen=True)
class Event:
    """Something that happened to a run: one of the fields after `position`, or none that this version knows."""

    position: int
    round_opened: RoundOpened | None = None
    delta_accepted: DeltaFate | None = None
    round_closed: RoundClosed | None = None
    version_committed: VersionCommitted | None = None
    fates_decided: FatesDecided | None = None
    policy_changed: Policy | None = None
    rolled_back: RolledBack | None = None
    status_changed: RunStatus | None = None
    learner: LearnerStatus | None = None
    draining: Draining | None = None

    @property
    def kind(self) -> str:
        """The name of the field that says what happened; empty for a kind that this version does not know."""
        kinds = [one.name for one in dataclasses.fields(self) if one.name != "position"]
        return next((kind for kind in kinds if getattr(self, kind) is not None), "")


@dataclass(frozen=True)
class Capabilities:
    """Version, codecs and limits of a server."""

    api_version: str = ""
    server_version: str = ""
    codecs: tuple[Codec, ...] = ()
    compressors: tuple[Compressor, ...] = ()
    max_message_size_bytes: int = 0
    max_frame_numel: int = 0
    max_fragment_numel: int = 0
    max_part_size_bytes: int = 0
    suggested_part_size_bytes: int = 0


def record_of(kind: type[R], message: Message) -> R:
    """Returns a message as the record of this kind.

    Raises:
        RefusedError: BAD_ANSWER: the message has a policy, a layout or a tensor that this version can't read, or a
            time that is none.
    """
    fields: Any = kind  # a type is hashable, whatever its instances are
    try:
        if isinstance(message, types_pb2.Run):
            unpack_layout(message)
        return kind(**{name: _field(hint, message, name) for name, hint in _hints(fields)})
    except ValueError as error:
        raise RefusedError("BAD_ANSWER", str(error)) from error


@cache
def _hints(kind: Any) -> tuple[tuple[str, Any], ...]:
    return tuple(typing.get_type_hints(kind).items())


def _field(hint: Any, message: Any, name: str) -> Any:
    fields = message.DESCRIPTOR.fields_by_name
    descriptor = fields[name if name in fields else name.removesuffix("_s")]
    if NoneType in typing.get_args(hint):
        if not message.HasField(descriptor.name):
            return None
        hint = next(one for one in typing.get_args(hint) if one is not NoneType)
    value = getattr(message, descriptor.name)
    if typing.get_origin(hint) is tuple:
        inner = typing.get_args(hint)[0]
        known = [_value(inner, one, descriptor.enum_type) for one in typing.cast("Sequence[Any]", value)]
        return tuple(one for one in known if one is not None)
    return _value(hint, value, descriptor.enum_type)


def _value(hint: Any, value: Any, enum: Any) -> Any:
    if isinstance(value, Duration):
        return value.seconds + value.nanos / 1e9
    if isinstance(value, Timestamp):
        return _time_of(value)
    if hint is Policy:
        return policy_of(value, Policy())
    if isinstance(value, Message):
        return record_of(hint, value)
    if enum is not None:
        return _word(hint, value, enum)
    return value


def _time_of(value: Timestamp) -> datetime:
    try:
        return value.ToDatetime(UTC)
    except (ValueError, OverflowError) as error:
        raise RefusedError("BAD_ANSWER", f"not a time. {error}") from error


def policy_of(message: types_pb2.Policy, base: Policy) -> Policy:
    """Returns `base` with what an answer's policy sets.

    Raises:
        RefusedError: BAD_ANSWER: this version does not know the policy.
    """
    try:
        return policy_from_message(message, base)
    except ValueError as error:
        raise RefusedError("BAD_ANSWER", f"the policy is not one that this version knows. {error}") from error


def _word(hint: Any, number: int, enum: Any) -> Any:
    """Returns the member of a StrEnum: RUN_STATUS_OPEN is "open". Of an unknown number UNSPECIFIED, else None."""
    prefix = enum.values_by_number[0].name.removesuffix("UNSPECIFIED")
    found = enum.values_by_number.get(number)
    word = "" if found is None else found.name.removeprefix(prefix).lower()
    return hint(word) if word in set(hint) else hint.__members__.get("UNSPECIFIED")
