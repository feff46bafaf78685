"""What the run log is made of, and its JSON, which FORMAT.md specifies: `run.json`, then entries that carry items.

`run.json` (`RunSpec`) has what never changes of a run: its tensors and its fragment plan. An entry is one object of the
log and carries any number of items, each one decision. The classes below are the format: their fields are the JSON
fields, `tag` is the item's `kind`, and a field at its default is left out. Unknown fields are ignored, unknown kinds
refused. Scalars of replayed arithmetic are the 8 hexadecimal digits of their float32 bits, other floats JSON numbers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any, Final

import msgspec
from blake3 import blake3

from skerry.wire.codecs import Encoding
from skerry.wire.layout import FragmentLayout
from skerry.wire.policy import Policy
from skerry.wire.untrained import UntrainedTensor
from skerry_syncer.store.errors import NewerFormatError
from skerry_syncer.store.objects.interface import read_json

FORMAT: Final = 1  # of every object of a store; raised when an older reader could misread one
INITIAL_BASE: Final = -1  # base version of the deltas that bring a draft's initial weights


class Fate(StrEnum):
    """What became of an accepted delta; every one but `PENDING` is final."""

    PENDING = "pending"
    MERGED = "merged"
    SUPERSEDED = "superseded"
    EXPIRED = "expired"
    QUARANTINED = "quarantined"


class RunStatus(StrEnum):
    """The life of a run, in order."""

    DRAFT = "draft"
    OPEN = "open"
    CLOSING = "closing"
    CLOSED = "closed"


class ObjectRef(msgspec.Struct, frozen=True):
    """An immutable object of a run and the element range that it holds; `name` is relative to the run's prefix."""

    name: str
    first: int
    numel: int
    size_bytes: int
    digest: str  # BLAKE3 in hex: for parts of the uncompressed frames, for updates and snapshots of the object


class _Item(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="kind"):
    """One decision."""

    @property
    def kind(self) -> str:
        """Its `kind` in the log."""
        return str(self.__struct_config__.tag)


class SessionItem(_Item, frozen=True, tag="session"):
    """A learner attached with a new session, which fences its older ones."""

    learner: str
    session: str
    region: str
    organisation: str = ""  # as its certificate has it


class LeftItem(_Item, frozen=True, tag="left"):
    """A learner left: it is no longer expected."""

    learner: str
    session: str


class AcceptedItem(_Item, frozen=True, tag="accepted"):
    """A delta was accepted; its push is acknowledged once this is durable and admitted."""

    delta: str
    fragment: str
    learner: str
    session: str
    base_version: int  # INITIAL_BASE for the initial weights of a draft
    base_digest: str
    digest: str
    parts: tuple[ObjectRef, ...]  # in element order, covering the fragment exactly
    step_count: int
    token_count: int
    last_step: int
    squared_norms: tuple[float, ...]  # |v_t|^2 of each tensor of the fragment

    @property
    def norm_a_step(self) -> float:
        """|v| / s, which compares deltas of different length."""
        return math.sqrt(math.fsum(self.squared_norms)) / max(self.step_count, 1)


class Member(msgspec.Struct, frozen=True):
    """One delta of a round's frozen set."""

    delta: str
    weight: float  # tokens-and-staleness weight w f, not normalised
    staleness: int


class Decided(msgspec.Struct, frozen=True):
    """A final fate other than merged, with its reason."""

    delta: str
    fate: Fate
    reason: str


class ClosedItem(_Item, frozen=True, tag="closed"):
    """A round was closed: its set is frozen, and deltas left out of it may get their fate here."""

    fragment: str
    version: int  # the version that the round makes
    attempt: int  # 0; one more each time an unreadable set is closed again
    members: tuple[Member, ...]
    participation: float  # rho, above 0 and at most 1
    decided: tuple[Decided, ...]
    length: float  # L, inner steps that the round stands for; 0 without members


class MergeScalars(msgspec.Struct, frozen=True):
    """Every scalar in the arithmetic of one version, as float32 bits in hex: with the deltas they replay it."""

    rate: str  # of the whole step: the outer learning rate times all that scales it
    momentum: str
    tensor_scales: tuple[str, ...]  # one a tensor
    coefficients: tuple[tuple[str, ...], ...]  # [member][tensor]
    decay: str  # of the momentum buffer over the round
    gain: str  # of the round's outer gradient in the momentum buffer


class CommittedItem(_Item, frozen=True, tag="committed"):
    """A round's merge became a version."""

    fragment: str
    version: int
    attempt: int
    update: tuple[ObjectRef, ...]
    encoding: Encoding  # how the update was quantised: part of the arithmetic
    digest: str  # tree digest of the new weights
    scalars: MergeScalars


class FateItem(_Item, frozen=True, tag="fates"):
    """Deltas met a final fate outside of a close."""

    decided: tuple[Decided, ...]


class PolicyItem(_Item, frozen=True, tag="policy"):
    """The policy from here on."""

    request_id: str
    policy: Any  # a Policy; it reads its own JSON, because a policy with an unknown field is refused
    author: str = ""  # whose call it was, as in their certificate; empty: servers without roles. So below

    def __post_init__(self) -> None:
        """Reads a policy that is still JSON values."""
        if not isinstance(self.policy, Policy):
            msgspec.structs.force_setattr(self, "policy", Policy.from_json(self.policy))


class SnapshotItem(_Item, frozen=True, tag="snapshot"):
    """Full weights and outer state of a version are stored. Version 0 exists by its snapshot alone."""

    fragment: str
    version: int
    digest: str
    weights: tuple[ObjectRef, ...]
    outer: tuple[ObjectRef, ...]  # momentum and residual; empty: both zero


class RollbackFragment(msgspec.Struct, frozen=True):
    """The next version of one fragment, with older content."""

    fragment: str
    version: int
    source_version: int
    digest: str
    weights: tuple[ObjectRef, ...]
    outer: tuple[ObjectRef, ...]


class RollbackItem(_Item, frozen=True, tag="rollback"):
    """Every named fragment got its next version with the content that it had at `target_position`."""

    request_id: str
    target_position: int
    fragments: tuple[RollbackFragment, ...]
    author: str = ""


class MetricsItem(_Item, frozen=True, tag="metrics"):
    """A judge reported metrics of the versions that every fragment had at `position`."""

    request_id: str
    position: int
    judge: str
    metrics: dict[str, float | None]  # by name; None: not finite, which is the worst value
    author: str = ""


class EjectionItem(_Item, frozen=True, tag="ejection"):
    """A learner was ejected from the run, or readmitted."""

    request_id: str
    learner: str
    is_ejected: bool
    author: str = ""


class CollectedItem(_Item, frozen=True, tag="collected"):
    """These object names are condemned: they may be deleted from now on and are never written again."""

    names: tuple[str, ...]


class StatusItem(_Item, frozen=True, tag="status"):
    """The run's life moved on."""

    status: RunStatus
    author: str = ""


class CheckpointItem(_Item, frozen=True, tag="checkpoint"):
    """The object `name` has the state of the fold after entry `at`; versions below `oldest` may be forgotten."""

    at: int
    name: str
    size_bytes: int
    digest: str  # BLAKE3 of the object, hex
    oldest: dict[str, int]  # by fragment
    kept_since: int | None = None  # weights of older ones stay that were the newest at or after it
    kept: tuple[int, ...] = ()  # or at one of these positions


Item = (
    SessionItem
    | LeftItem
    | AcceptedItem
    | ClosedItem
    | CommittedItem
    | FateItem
    | PolicyItem
    | SnapshotItem
    | RollbackItem
    | MetricsItem
    | EjectionItem
    | CollectedItem
    | StatusItem
    | CheckpointItem
)


class Entry(msgspec.Struct, frozen=True):
    """One object of the run log."""

    position: int  # its number in the log, from 1
    run_uid: str
    previous: str  # BLAKE3 of the predecessor's bytes, hex; of `run.json` for the first
    writer: str  # the replica that wrote it; for people
    write_id: str  # random; tells one's own entry from another's when a create is read back
    written_at_unix_s: float  # the writer's clock; for people, never for decisions
    items: tuple[Item, ...]
    format: int = FORMAT
    age_s: float = 0.0  # how long the run had been served, as `RunLog.age_s` counts it; left out where 0

    def to_bytes(self) -> bytes:
        """Returns the entry's canonical JSON."""
        values = msgspec.structs.asdict(self) | {"items": [item_to_json(item) for item in self.items]}
        return canonical_json({name: value for name, value in values.items() if name != "age_s" or value})

    @classmethod
    def from_bytes(cls, data: bytes) -> Entry:
        """Returns the entry that `to_bytes` gave.

        Raises:
            NewerFormatError: a newer version wrote it.
            ValueError: not an entry.
        """
        check_format(read_json(data, _Format).format)
        return read_json(data, cls)


class _Format(msgspec.Struct):
    """The only field of an entry that is read before its format is known to be one of ours."""

    format: int


def canonical_json(value: Any) -> bytes:
    """Returns `value` as UTF-8 JSON with sorted keys and no white space, so that equal values have equal digests."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def bytes_digest(data: bytes) -> str:
    """Returns the BLAKE3 of `data` in hex."""
    return blake3(data).hexdigest()


def check_format(format_number: int) -> None:
    """Refuses an object of another format.

    Raises:
        NewerFormatError: a newer version wrote it.
        ValueError: no version that this one can read wrote it.
    """
    facts = f"format={format_number}, known={FORMAT}"
    if format_number > FORMAT:
        raise NewerFormatError(f"written by a newer version; upgrade to read it. {facts}")
    if format_number != FORMAT:
        raise ValueError(f"format is not known. {facts}")


def item_to_json(item: Item) -> dict[str, Any]:
    """Returns the item as JSON values: its kind, and its fields but for those that are at their default."""
    values: dict[str, Any] = msgspec.to_builtins(item)
    return values | {"policy": item.policy.to_json()} if isinstance(item, PolicyItem) else values


def run_prefix(name: str, uid: str) -> str:
    """Returns the folder of a run."""
    return f"runs/{name}/{uid}"


def entry_name(prefix: str, position: int) -> str:
    """Returns the object name of the log entry at `position`, or for position 0 of `run.json`."""
    return f"{prefix}/log/{position:020}" if position else f"{prefix}/run.json"


@dataclass(frozen=True)
class RunSpec:
    """A run as it was created."""

    name: str
    uid: str
    fragments: tuple[FragmentLayout, ...]
    dtypes: Mapping[str, str]  # the learner's own element type, by tensor name
    created_at_unix_s: float  # the creating replica's clock; for people only
    untrained: tuple[UntrainedTensor, ...] = ()  # in the order that the creator gave; empty: not known

    def fragment(self, name: str) -> FragmentLayout:
        """Returns the layout of the fragment called `name`; KeyError where there is none."""
        return {layout.name: layout for layout in self.fragments}[name]

    @cached_property
    def digest(self) -> str:
        """The BLAKE3 of `run.json` in hex."""
        return bytes_digest(self.to_bytes())

    def to_bytes(self) -> bytes:
        """Returns `run.json`."""

        def tensors(layout: FragmentLayout) -> list[dict[str, Any]]:
            return [{"name": t.name, "shape": list(t.shape), "dtype": self.dtypes[t.name]} for t in layout.tensors]

        values = {
            "format": FORMAT,
            "name": self.name,
            "uid": self.uid,
            "created_at_unix_s": self.created_at_unix_s,
            "fragments": [{"name": layout.name, "tensors": tensors(layout)} for layout in self.fragments],
        }
        untrained = msgspec.to_builtins(self.untrained)
        return canonical_json(values | ({"untrained": untrained} if untrained else {}))

    @classmethod
    def from_bytes(cls, data: bytes) -> RunSpec:
        """Returns the spec that `to_bytes` gave.

        Raises:
            NewerFormatError: a newer version wrote it.
            ValueError, KeyError, TypeError: not a `run.json`.
        """
        values = read_json(data, dict[str, Any])
        check_format(values["format"])
        if not values["fragments"]:
            raise ValueError("a run has at least one fragment")
        fragments = msgspec.convert(values["fragments"], tuple[FragmentLayout, ...])
        dtypes = {t["name"]: t["dtype"] for f in values["fragments"] for t in f["tensors"]}
        untrained = msgspec.convert(values.get("untrained", ()), tuple[UntrainedTensor, ...])
        return cls(values["name"], values["uid"], fragments, dtypes, values["created_at_unix_s"], untrained)
