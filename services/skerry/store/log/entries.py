"""What the run log says: items, the entries that carry them, and their JSON, which FORMAT.md specifies.

An entry is one object of the log. It carries any number of items; each item is one decision. Scalars that enter
replayed arithmetic are stored as the 8 hexadecimal digits of their float32 bits; other floats are JSON numbers in
shortest round-trip form.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar, Final, get_args, get_origin, get_type_hints

from skerry.wire.codecs import Encoding
from skerry.wire.layout import FragmentLayout, TensorSpec
from skerry.wire.policy import Policy, encoding_from_json

# Raised when an old reader could misread what it numbers; readers refuse a higher one.
FORMAT: Final = 1  # of everything but log entries
# Of log entries. 2 brought the momentum's decay and gain. In 3 a close names its length, and a base is too old by
# rounds where it was by versions.
ENTRY_FORMAT: Final = 3
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


@dataclass(frozen=True)
class RunSpec:
    """What never changes of a run: its tensors and fragment plan (`run.json`)."""

    name: str
    uid: str
    fragments: tuple[FragmentLayout, ...]
    dtypes: Mapping[str, str]  # the learner's own element type, by tensor name
    created_at_unix_s: float  # the creating replica's clock; for people only

    def fragment(self, name: str) -> FragmentLayout:
        """Returns the layout of the fragment called `name`.

        Raises:
            KeyError: there is none.
        """
        for layout in self.fragments:
            if layout.name == name:
                return layout
        raise KeyError(name)

    def to_bytes(self) -> bytes:
        """Returns `run.json`."""
        return canonical_json(
            {
                "format": FORMAT,
                "name": self.name,
                "uid": self.uid,
                "created_at_unix_s": self.created_at_unix_s,
                "fragments": [
                    {
                        "name": layout.name,
                        "tensors": [
                            {"name": t.name, "shape": list(t.shape), "dtype": self.dtypes[t.name]}
                            for t in layout.tensors
                        ],
                    }
                    for layout in self.fragments
                ],
            }
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> RunSpec:
        """Returns the spec that `to_bytes` gave.

        Raises:
            ValueError: not a `run.json` that this version reads.
        """
        values = json.loads(data)
        _check_format(values, FORMAT)
        fragments = tuple(
            FragmentLayout(f["name"], tuple(TensorSpec(t["name"], tuple(t["shape"])) for t in f["tensors"]))
            for f in values["fragments"]
        )
        dtypes = {t["name"]: t["dtype"] for f in values["fragments"] for t in f["tensors"]}
        return cls(values["name"], values["uid"], fragments, dtypes, values["created_at_unix_s"])


@dataclass(frozen=True)
class ObjectRef:
    """An immutable object of a run and the element range that it holds; `name` is relative to the run's prefix."""

    name: str
    first: int
    numel: int
    size_bytes: int
    digest: (
        str  # parts: SHA-256 of the uncompressed frame bytes; updates and snapshots: SHA-256 of the object's bytes; hex
    )


@dataclass(frozen=True)
class SessionItem:
    """A learner attached with a new session, which fences its older ones."""

    kind: ClassVar[str] = "session"
    learner: str
    session: str
    region: str
    seen_position: int = 0  # the newest position that the learner had seen when it asked to attach; 0: not stated


@dataclass(frozen=True)
class LeftItem:
    """A learner said goodbye: it is no longer expected."""

    kind: ClassVar[str] = "left"
    learner: str
    session: str


@dataclass(frozen=True)
class AcceptedItem:
    """A delta was accepted; its push is acknowledged once this is durable and admitted."""

    kind: ClassVar[str] = "accepted"
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


@dataclass(frozen=True)
class Member:
    """One delta of a round's frozen set."""

    delta: str
    weight: float  # tokens-and-staleness weight w f, not normalised
    staleness: int


@dataclass(frozen=True)
class Decided:
    """A final fate other than merged, with its reason."""

    delta: str
    fate: Fate
    reason: str


@dataclass(frozen=True)
class ClosedItem:
    """A round was closed: its set is frozen, and deltas left out of it may get their fate here."""

    kind: ClassVar[str] = "closed"
    fragment: str
    version: int  # the version that the round makes
    attempt: int  # 0; one more each time an unreadable set is closed again
    members: tuple[Member, ...]
    participation: float  # rho, above 0 and at most 1
    decided: tuple[Decided, ...]
    length: float = 0.0  # L, inner steps that the round stands for; 0 in formats below 3, and without members


@dataclass(frozen=True)
class MergeScalars:
    """Every scalar in the arithmetic of one version, as float32 bits in hex: with the deltas they replay it."""

    rate: str  # of the whole step: the outer learning rate times all that scales it
    momentum: str
    tensor_scales: tuple[str, ...]  # one a tensor
    coefficients: tuple[tuple[str, ...], ...]  # [member][tensor]
    decay: str = ""  # of the momentum buffer over the round; empty, as format 1 has it: momentum
    gain: str = "3f800000"  # of the round's outer gradient in the momentum buffer


@dataclass(frozen=True)
class CommittedItem:
    """A round's merge became a version."""

    kind: ClassVar[str] = "committed"
    fragment: str
    version: int
    attempt: int
    update: tuple[ObjectRef, ...]
    encoding: Encoding  # how the update was quantised: part of the arithmetic
    digest: str  # tree digest of the new weights
    scalars: MergeScalars


@dataclass(frozen=True)
class FateItem:
    """Deltas met a final fate outside of a close."""

    kind: ClassVar[str] = "fates"
    decided: tuple[Decided, ...]


@dataclass(frozen=True)
class PolicyItem:
    """The policy from here on."""

    kind: ClassVar[str] = "policy"
    request_id: str
    policy: Policy


@dataclass(frozen=True)
class SnapshotItem:
    """Full weights and outer state of a version are stored. Version 0 exists by its snapshot alone."""

    kind: ClassVar[str] = "snapshot"
    fragment: str
    version: int
    digest: str
    weights: tuple[ObjectRef, ...]
    outer: tuple[ObjectRef, ...]  # momentum and residual; empty: both zero


@dataclass(frozen=True)
class RollbackFragment:
    """The next version of one fragment, with older content."""

    fragment: str
    version: int
    source_version: int
    digest: str
    weights: tuple[ObjectRef, ...]
    outer: tuple[ObjectRef, ...]


@dataclass(frozen=True)
class RollbackItem:
    """Every named fragment got its next version with the content that it had at `target_position`."""

    kind: ClassVar[str] = "rollback"
    request_id: str
    target_position: int
    fragments: tuple[RollbackFragment, ...]


@dataclass(frozen=True)
class CollectedItem:
    """These object names are condemned: they may be deleted from now on and are never written again."""

    kind: ClassVar[str] = "collected"
    names: tuple[str, ...]


@dataclass(frozen=True)
class StatusItem:
    """The run's life moved on."""

    kind: ClassVar[str] = "status"
    status: RunStatus


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
    | CollectedItem
    | StatusItem
)


@dataclass(frozen=True)
class Entry:
    """One object of the run log."""

    position: int  # its number in the log, from 1
    run_uid: str
    previous: str  # SHA-256 of the predecessor's bytes, hex; of `run.json` for the first
    writer: str  # the replica that wrote it; for people
    write_id: str  # random; tells one's own entry from another's when a create is read back
    written_at_unix_s: float  # the writer's clock; for people, never for decisions
    items: tuple[Item, ...]
    format: int = ENTRY_FORMAT

    def to_bytes(self) -> bytes:
        """Returns the entry's canonical JSON."""
        return canonical_json(
            {
                "format": self.format,
                "position": self.position,
                "run_uid": self.run_uid,
                "previous": self.previous,
                "writer": self.writer,
                "write_id": self.write_id,
                "written_at_unix_s": self.written_at_unix_s,
                "items": [item_to_json(item) for item in self.items],
            }
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> Entry:
        """Returns the entry that `to_bytes` gave.

        Raises:
            ValueError: not an entry that this version reads.
        """
        try:
            values = json.loads(data)
            _check_format(values, ENTRY_FORMAT)
            return cls(
                position=values["position"],
                run_uid=values["run_uid"],
                previous=values["previous"],
                writer=values["writer"],
                write_id=values["write_id"],
                written_at_unix_s=values["written_at_unix_s"],
                items=tuple(item_from_json(item) for item in values["items"]),
                format=values["format"],
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"log entry is malformed. cause={error!r}") from error


def canonical_json(value: Any) -> bytes:
    """Returns `value` as UTF-8 JSON with sorted keys and no white space, so that equal values have equal digests."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def bytes_digest(data: bytes) -> str:
    """Returns the SHA-256 of `data` in hex."""
    return hashlib.sha256(data).hexdigest()


def float32_to_hex(value: float) -> str:
    """Returns the bits of `value` as float32, 8 hex digits, most significant first."""
    return struct.pack(">f", value).hex()


def float32_from_hex(digits: str) -> float:
    """Returns the float32 with these bits, exactly."""
    return float(struct.unpack(">f", bytes.fromhex(digits))[0])


def _check_format(values: Mapping[str, Any], known: int) -> None:
    if values["format"] > known:
        raise ValueError(f"written by a newer version; upgrade to read it. format={values['format']}, known={known}")


def item_to_json(item: Item) -> dict[str, Any]:
    """Returns the item as JSON values: its kind, and its fields but for those that are at their default."""
    defaults = {entry.name: entry.default for entry in dataclasses.fields(item)}
    values = dataclasses.asdict(item)
    if isinstance(item, CommittedItem) and not item.scalars.decay:  # as it was read: format 1 has neither
        del values["scalars"]["decay"], values["scalars"]["gain"]
    if isinstance(item, PolicyItem):
        values["policy"] = item.policy.to_json()
    return {"kind": item.kind} | {name: value for name, value in values.items() if value != defaults[name]}


def item_from_json(values: Mapping[str, Any]) -> Item:
    """Returns the item that `item_to_json` gave.

    Raises:
        ValueError: the kind is not known, or a value is not legal.
        KeyError, TypeError: a field is missing, or of the wrong type.
    """
    kind = _KINDS.get(values["kind"])
    if kind is None:
        raise ValueError(f"item kind is not known; written by a newer version? kind={values['kind']!r}")
    item: Item = _from_json(kind, values)
    return item


_KINDS: Final = {kind.kind: kind for kind in get_args(Item)}


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return {name: hint for name, hint in get_type_hints(kind).items() if get_origin(hint) is not ClassVar}


def _from_json(hint: Any, value: Any) -> Any:
    if hint is Policy:
        return Policy.from_json(value)
    if hint is Encoding:
        return encoding_from_json(value)
    if dataclasses.is_dataclass(hint):
        # Older writers lack the fields that were added since, which have defaults; a lack of others is a TypeError.
        return hint(**{name: _from_json(inner, value[name]) for name, inner in _hints(hint).items() if name in value})  # type: ignore[arg-type,operator]
    if get_origin(hint) is tuple:
        return tuple(_from_json(get_args(hint)[0], element) for element in value)
    if hint is float:
        return float(value)
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return hint(value)
    if not isinstance(value, hint):
        raise TypeError(f"log value has the wrong type. expected={hint.__name__}, actual={value!r:.80}")
    return value
