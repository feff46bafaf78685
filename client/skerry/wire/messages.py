"""Converts policies, encodings and layouts to messages of `skerry.v1` and back, for client and syncer.

`skerry.wire` does not import this module, so that the rest of the package needs no protobuf.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from enum import StrEnum
from typing import Any, Final, TypeVar

from google.protobuf.message import DecodeError

from skerry.v1 import runs_pb2
from skerry.v1 import types_pb2 as v1
from skerry.wire.codecs import Codec, Compressor, Encoding
from skerry.wire.layout import MAX_DIMS, MAX_TENSOR_NAME_BYTES, FragmentLayout, TensorSpec, check_name
from skerry.wire.policy import MergeRule, OuterName, OuterOptimizer, OuterSchedule, Policy
from skerry.wire.untrained import UntrainedTensor

E = TypeVar("E", bound=StrEnum)

# Pins, and merge rules of fragments, of one message.
_MOST_ENTRIES: Final = 1000
# Of the tensors and fragments of a run, as messages: more is packed. Names of experts take a thirtieth then.
_PLAIN_LAYOUT_BYTES: Final = 2**20
_MOST_LAYOUT_BYTES: Final = 2**26
# Block sizes that the contract allows. With smaller ones the scales take more bytes than better codes save.
MIN_BLOCK: Final = 16
MAX_BLOCK: Final = 4096

# Fields of Policy that its message has under the same name and as the same kind of number.
_PLAIN_FIELDS: Final = tuple(
    entry.name for entry in dataclasses.fields(Policy) if "range" in entry.metadata and entry.name != "lease_term_s"
)


def encoding_to_message(encoding: Encoding) -> v1.Encoding:
    """Returns the encoding as a message."""
    has_blocks = encoding.codec.has_blocks
    return v1.Encoding(
        codec=enum_to_message(v1.Codec, encoding.codec),
        block=encoding.block if has_blocks else 0,
        vector_codec=enum_to_message(v1.Codec, encoding.vector_codec if has_blocks else encoding.codec),
        compressor=enum_to_message(v1.Compressor, encoding.compressor),
    )


def encoding_from_message(message: v1.Encoding) -> Encoding:
    """Returns the encoding that a message states.

    Raises:
        ValueError: a codec or compressor that is not known, or a block size out of its range.
    """
    codec = _member(v1.Codec, Codec, message.codec)
    vector_codec = _member(v1.Codec, Codec, message.vector_codec or message.codec)
    if codec.has_blocks and not MIN_BLOCK <= message.block <= MAX_BLOCK:
        raise ValueError(f"block size is out of range. low={MIN_BLOCK}, high={MAX_BLOCK}, actual={message.block}")
    return Encoding(
        codec=codec,
        block=message.block if codec.has_blocks else Encoding.block,
        vector_codec=vector_codec,
        compressor=_member(v1.Compressor, Compressor, message.compressor or v1.COMPRESSOR_NONE),
    )


def policy_to_message(policy: Policy, *, has_derived: bool = True) -> v1.Policy:
    """Returns the policy as a message with every field set.

    With `has_derived` false a tau that follows from H is left out, so that it goes on following it.
    """
    message = v1.Policy(
        outer=v1.OuterOptimizer(
            name=policy.outer.name,
            learning_rate=policy.outer.learning_rate,
            momentum=policy.outer.momentum,
            schedule=enum_to_message(v1.OuterSchedule, policy.outer.schedule),
        ),
        merge=enum_to_message(v1.MergeRule, policy.merge),
        merge_by_fragment={
            name: enum_to_message(v1.MergeRule, rule) for name, rule in policy.merge_by_fragment.items()
        },
        delta_encoding=encoding_to_message(policy.delta_encoding),
        update_encoding=encoding_to_message(policy.update_encoding),
        pinned_positions=policy.pinned_positions,
    )
    for name in _PLAIN_FIELDS:
        if (value := getattr(policy, name)) is not None:
            setattr(message, name, value)
    if has_derived:
        message.delay_step_count = policy.tau
    message.lease_term.FromTimedelta(timedelta(seconds=policy.lease_term_s))
    return message


def policy_from_message(message: v1.Policy, base: Policy) -> Policy:
    """Returns `base` with what the message sets: scalars and inner messages as a whole, merge rules by fragment.

    A merge rule of a fragment that is unspecified takes that fragment's rule away, and the negative of a position its
    pin.

    Raises:
        ValueError: a value that is out of its range or not known.
    """
    if max(len(message.pinned_positions), len(message.merge_by_fragment)) > _MOST_ENTRIES:
        raise ValueError(f"too many pinned positions or merge rules. limit={_MOST_ENTRIES}")
    is_set = {field.name for field, _ in message.ListFields()}
    changes: dict[str, Any] = {name: getattr(message, name) for name in _PLAIN_FIELDS if name in is_set}
    if message.HasField("outer"):
        changes["outer"] = OuterOptimizer(
            name=OuterName(message.outer.name or OuterOptimizer.name),
            learning_rate=message.outer.learning_rate,
            momentum=message.outer.momentum,
            schedule=_member(v1.OuterSchedule, OuterSchedule, message.outer.schedule or v1.OUTER_SCHEDULE_WARM_UP),
        )
    if message.merge != v1.MERGE_RULE_UNSPECIFIED:
        changes["merge"] = _member(v1.MergeRule, MergeRule, message.merge)
    if message.merge_by_fragment:
        changes["merge_by_fragment"] = _merge_rules(message.merge_by_fragment, base.merge_by_fragment)
    if message.pinned_positions:
        pins = {*base.pinned_positions, *(at for at in message.pinned_positions if at > 0)}
        changes["pinned_positions"] = tuple(sorted(pins - {-at for at in message.pinned_positions}))
    if message.HasField("delta_encoding"):
        changes["delta_encoding"] = encoding_from_message(message.delta_encoding)
    if message.HasField("update_encoding"):
        changes["update_encoding"] = encoding_from_message(message.update_encoding)
    if message.HasField("lease_term"):
        # Not by way of a timedelta, which fails on what the policy refuses.
        changes["lease_term_s"] = message.lease_term.seconds + message.lease_term.nanos / 1e9
    return dataclasses.replace(base, **changes)


def _merge_rules(
    changes: Mapping[str, v1.MergeRule.ValueType], base: Mapping[str, MergeRule]
) -> Mapping[str, MergeRule]:
    rules = dict(base)
    for fragment, value in sorted(changes.items()):
        if value == v1.MERGE_RULE_UNSPECIFIED:
            rules.pop(fragment, None)
        else:
            rules[fragment] = _member(v1.MergeRule, MergeRule, value)
    return rules


def _member(enum: Any, kind: type[E], number: int) -> E:
    member = enum_from_message(enum, kind, number)
    if member is None:
        name = _prefix(enum).rstrip("_").replace("_", " ").lower()
        raise ValueError(f"{name} is not offered. value={number}, known={[str(one) for one in kind]}")
    return member


def enum_to_message(enum: Any, member: StrEnum) -> Any:
    """Returns the value of a message's enum that has the member's name."""
    return enum.Value(_prefix(enum) + member.name)


def enum_word(enum: Any, number: int) -> str:
    """Returns the word for a number of an enum's descriptor: "open" for RUN_STATUS_OPEN; "unspecified" if not known."""
    prefix = enum.values_by_number[0].name.removesuffix("UNSPECIFIED")
    value = enum.values_by_number.get(number, enum.values_by_number[0])
    return str(value.name.removeprefix(prefix).lower())


def enum_from_message(enum: Any, kind: type[E], number: int) -> E | None:
    """Returns the member of `kind` that has the name of a message's value; None: it has none."""
    name = enum.Name(number).removeprefix(_prefix(enum)) if number in enum.values() else ""
    return kind.__members__.get(name)


def _prefix(enum: Any) -> str:
    prefix: str = enum.Name(0).removesuffix("UNSPECIFIED")
    return prefix


def layouts_to_messages(
    fragments: Iterable[FragmentLayout], dtypes: Mapping[str, str]
) -> tuple[list[v1.Tensor], list[v1.Fragment]]:
    """Returns the tensors and the fragment plan of a run; `dtypes` by tensor name, "float32" where it has none."""
    layouts = tuple(fragments)
    tensors = [
        v1.Tensor(name=tensor.name, shape=tensor.shape, dtype=dtypes.get(tensor.name, "float32"))
        for layout in layouts
        for tensor in layout.tensors
    ]
    plan = [v1.Fragment(name=layout.name, tensors=[tensor.name for tensor in layout.tensors]) for layout in layouts]
    return tensors, plan


def layouts_from_messages(
    tensors: Sequence[v1.Tensor],
    fragments: Sequence[v1.Fragment],
) -> tuple[tuple[FragmentLayout, ...], dict[str, str]]:
    """Returns the layouts in plan order, and each tensor's element type by name.

    Raises:
        ValueError: names or shapes are not legal, or the plan is not a partition of the tensors.
    """
    specs = {tensor.name: tensor_from_message(tensor) for tensor in tensors}
    if not specs or len(specs) != len(tensors):
        raise ValueError(f"tensor names are not unique, or there are none. tensors={len(tensors)}, names={len(specs)}")
    placed = [name for fragment in fragments for name in fragment.tensors]
    if len(set(placed)) != len(placed) or set(placed) != specs.keys():
        odd = sorted(set(placed) ^ specs.keys()) or sorted(name for name, count in Counter(placed).items() if count > 1)
        raise ValueError(f"plan is not a partition of the tensors. missing, unknown or repeated={odd[:5]}")
    layouts = tuple(
        FragmentLayout(check_name(fragment.name, "fragment"), tuple(specs[name] for name in fragment.tensors))
        for fragment in fragments
    )
    empty = [layout.name for layout in layouts if not layout.tensors]
    if empty or len({layout.name for layout in layouts}) != len(layouts):
        raise ValueError(f"a fragment is empty, or its name is repeated. empty={empty}")
    return layouts, {tensor.name: tensor.dtype or "float32" for tensor in tensors}


def pack_layout(message: v1.Run | runs_pb2.CreateRunRequest) -> None:
    """Packs the tensors and fragments of a message that would be too long with them, in place."""
    layout = v1.Layout(tensors=message.tensors, fragments=message.fragments, untrained=message.untrained)
    if layout.ByteSize() > _PLAIN_LAYOUT_BYTES:
        message.packed_layout = zlib.compress(layout.SerializeToString())
        for field in ("tensors", "fragments", "untrained"):
            message.ClearField(field)


def unpack_layout(message: v1.Run | runs_pb2.CreateRunRequest) -> None:
    """Puts packed tensors and fragments where others have them, in place.

    Raises:
        ValueError: they can't be unpacked, or are too long.
    """
    if not message.packed_layout:
        return
    unpacking, layout = zlib.decompressobj(), v1.Layout()
    try:
        layout.ParseFromString(unpacking.decompress(message.packed_layout, _MOST_LAYOUT_BYTES))
    except (zlib.error, DecodeError) as error:
        raise ValueError(f"packed_layout can't be unpacked. cause={error}") from error
    if not unpacking.eof:
        raise ValueError(f"packed_layout is cut off, or longer than the limit. limit_bytes={_MOST_LAYOUT_BYTES}")
    message.ClearField("packed_layout")
    message.tensors.extend(layout.tensors)
    message.fragments.extend(layout.fragments)
    message.untrained.extend(layout.untrained)


def tensor_from_message(tensor: v1.Tensor) -> TensorSpec:
    """Returns a tensor's name and shape.

    Raises:
        ValueError: the name is empty or too long, or a dimension is below 1.
    """
    if not 1 <= len(tensor.name.encode()) <= MAX_TENSOR_NAME_BYTES:
        raise ValueError(f"tensor name must have 1 to {MAX_TENSOR_NAME_BYTES} bytes. name={tensor.name[:80]!r}")
    if len(tensor.shape) <= MAX_DIMS and any(size < 1 for size in tensor.shape):  # TensorSpec refuses more
        raise ValueError(f"every dimension must be at least 1. tensor={tensor.name!r}, shape={list(tensor.shape)}")
    return TensorSpec(tensor.name, tuple(tensor.shape[: MAX_DIMS + 1]))


def untrained_to_messages(tensors: Iterable[UntrainedTensor]) -> list[v1.UntrainedTensor]:
    """Returns the tensors of a model that are not trained."""
    return [v1.UntrainedTensor(name=one.name, shape=one.shape, dtype=one.dtype, digest=one.digest) for one in tensors]


def untrained_from_messages(messages: Iterable[v1.UntrainedTensor]) -> tuple[UntrainedTensor, ...]:
    """Returns what `untrained_to_messages` gave.

    Raises:
        ValueError: a field is not legal.
    """
    return tuple(UntrainedTensor(one.name, tuple(one.shape[: MAX_DIMS + 1]), one.dtype, one.digest) for one in messages)
