"""Converts policies, encodings and layouts to messages of `skerry.v1` and back, for client and syncer.

`skerry.wire` does not import this module, so that the rest of the package needs no protobuf.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, MutableMapping, MutableSequence, Sequence
from enum import StrEnum
from functools import cache
from typing import Any, Final, TypeVar

import msgspec
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError, Message
from google.protobuf.timestamp_pb2 import Timestamp

from skerry.v1 import runs_pb2
from skerry.v1 import types_pb2 as v1
from skerry.wire.codecs import Codec, Compressor, Encoding
from skerry.wire.layout import MAX_DIMS, MAX_TENSOR_NAME_BYTES, FragmentLayout, TensorSpec, check_name
from skerry.wire.policy import Policy
from skerry.wire.untrained import UntrainedTensor

M = TypeVar("M", bound=Message)

UNSPECIFIED: Final = "unspecified"
# Pins, and merge rules of fragments, of one message.
_MOST_ENTRIES: Final = 1000
# Of the tensors and fragments of a run, as messages: more is packed. Names of experts take a thirtieth then.
_PLAIN_LAYOUT_BYTES: Final = 2**20
_MOST_LAYOUT_BYTES: Final = 2**26
# Block sizes that the contract allows. With smaller ones the scales take more bytes than better codes save.
MIN_BLOCK: Final = 16
MAX_BLOCK: Final = 4096


def to_values(message: Message) -> dict[str, Any]:
    """Returns the fields of a message as plain values; those that are absent are left out.

    An enum value is its name as a word, "warm-up" for OUTER_SCHEDULE_WARM_UP, or its number if this version does not
    know it. Durations are seconds under a name that ends in `_s`, timestamps ISO 8601, bytes hexadecimal.
    """
    values: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        if field.has_presence and not message.HasField(field.name):
            continue
        value: Any = getattr(message, field.name)
        if isinstance(value, Duration):
            values[f"{field.name}_s"] = value.seconds + value.nanos / 1e9
        elif isinstance(value, MutableMapping):
            enum = _item_enum(field)
            values[field.name] = {key: _to_value(enum, item) for key, item in value.items()}
        elif isinstance(value, MutableSequence):
            values[field.name] = [_to_value(field.enum_type, item) for item in value]
        else:
            values[field.name] = _to_value(field.enum_type, value)
    return values


def _to_value(enum: Any, value: Any) -> Any:
    if enum is not None:
        return enum_word(enum, value)
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Timestamp):
        return value.ToJsonString()
    return to_values(value) if isinstance(value, Message) else value


def fill(message: M, values: Mapping[str, Any]) -> M:
    """Sets fields of a message from what `to_values` gives of one, or from members of enums; returns the message.

    None leaves a field absent. Bytes and timestamps are not set.
    """
    fields = message.DESCRIPTOR.fields_by_name
    for name, value in values.items():
        if value is None:
            continue
        field = fields[name if name in fields else name.removesuffix("_s")]
        target: Any = getattr(message, field.name)
        if isinstance(target, Duration):
            target.FromNanoseconds(round(value * 1e9))
        elif isinstance(target, MutableMapping):
            enum = _item_enum(field)
            target.update({key: _number(enum, word) for key, word in value.items()})
        elif isinstance(target, MutableSequence):
            target.extend(value)
        elif isinstance(target, Message):
            target.SetInParent()
            fill(target, value)
        else:
            setattr(message, field.name, value if field.enum_type is None else _number(field.enum_type, value))
    return message


def enum_word(enum: Any, number: int) -> str:
    """Returns the word for a number of an enum's descriptor: "open" for RUN_STATUS_OPEN; the number if it has none."""
    value = enum.values_by_number.get(number)
    return str(number) if value is None else value.name.removeprefix(_prefix(enum)).lower().replace("_", "-")


@cache
def _number(enum: Any, word: str) -> int:
    number: int = enum.values_by_name[_prefix(enum) + word.upper().replace("-", "_")].number
    return number


def _item_enum(field: Any) -> Any:
    """Returns the descriptor of the enum of a map's values, if they are of one."""
    return field.message_type.fields_by_name["value"].enum_type


def _prefix(enum: Any) -> str:
    prefix: str = enum.values_by_number[0].name.removesuffix("UNSPECIFIED")
    return prefix


def enum_to_message(enum: Any, member: StrEnum) -> Any:
    """Returns the value of a message's enum that has the member's name."""
    return _number(enum.DESCRIPTOR, member)


def encoding_to_message(encoding: Encoding) -> v1.Encoding:
    """Returns the encoding as a message."""
    message = fill(v1.Encoding(), vars(encoding))
    if not encoding.codec.has_blocks:
        message.block, message.vector_codec = 0, message.codec
    return message


def encoding_from_message(message: v1.Encoding) -> Encoding:
    """Returns the encoding that a message states.

    Raises:
        ValueError: a codec or compressor that is not known, or a block size out of its range.
    """
    codec = Codec(enum_word(v1.Codec.DESCRIPTOR, message.codec))
    if codec.has_blocks and not MIN_BLOCK <= message.block <= MAX_BLOCK:
        raise ValueError(f"block size is out of range. low={MIN_BLOCK}, high={MAX_BLOCK}, actual={message.block}")
    return Encoding(
        codec=codec,
        block=message.block if codec.has_blocks else Encoding.block,
        vector_codec=Codec(enum_word(v1.Codec.DESCRIPTOR, message.vector_codec or message.codec)),
        compressor=Compressor(enum_word(v1.Compressor.DESCRIPTOR, message.compressor or v1.COMPRESSOR_NONE)),
    )


def policy_to_message(policy: Policy, *, has_derived: bool = True) -> v1.Policy:
    """Returns the policy as a message with every field set.

    With `has_derived` false a tau that follows from H is left out, so that it goes on following it.
    """
    message = fill(v1.Policy(), policy.to_json())
    message.delta_encoding.CopyFrom(encoding_to_message(policy.delta_encoding))
    message.update_encoding.CopyFrom(encoding_to_message(policy.update_encoding))
    if has_derived:
        message.delay_step_count = policy.tau
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
    changes = _specified(to_values(message))
    for name in ("delta_encoding", "update_encoding"):
        if name in changes:
            changes[name] = encoding_from_message(getattr(message, name))
    if "outer" in changes:
        changes["outer"] = _specified(changes["outer"])
    changes["merge_by_fragment"] = _specified({**base.merge_by_fragment, **changes["merge_by_fragment"]})
    pins = {*base.pinned_positions, *message.pinned_positions}
    changes["pinned_positions"] = sorted(position for position in pins if position > 0 and -position not in pins)
    return Policy.from_json({**base.to_json(), **changes})


def _specified(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value not in ("", UNSPECIFIED)}


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
    return [v1.UntrainedTensor(**msgspec.structs.asdict(tensor)) for tensor in tensors]


def untrained_from_messages(messages: Iterable[v1.UntrainedTensor]) -> tuple[UntrainedTensor, ...]:
    """Returns what `untrained_to_messages` gave.

    Raises:
        ValueError: a field is not legal.
    """
    return tuple(msgspec.convert(to_values(message), UntrainedTensor) for message in messages)
