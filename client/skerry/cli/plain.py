"""Messages of the contract as plain JSON values, the same in every command's `--json`.

Field names are the contract's. Every field without presence is there, also at its default. Integers are integers,
digests hexadecimal, enum values in lower case without their prefix, durations seconds under a name that ends in `_s`,
timestamps ISO 8601.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

# Descriptors come from either of two implementations, whose classes have no common name for the type checker.
Field: TypeAlias = Any
Enum: TypeAlias = Any


def to_json(message: Message) -> dict[str, Any]:
    """Returns a message as JSON values."""
    result: dict[str, Any] = {}
    field: Field
    for field in message.DESCRIPTOR.fields:
        if field.has_presence and not message.HasField(field.name):
            continue
        value = getattr(message, field.name)
        if is_map(field):
            values = field.message_type.fields_by_name["value"]
            result[field.name] = {str(key): _value(values, value[key]) for key in sorted(value)}
        elif field.is_repeated:
            result[field.name] = [_value(field, item) for item in value]
        else:
            result[field.name + ("_s" if is_duration(field) else "")] = _value(field, value)
    return result


def to_line(values: Mapping[str, Any] | Iterable[Any]) -> str:
    """Returns JSON values as one line."""
    return json.dumps(values, ensure_ascii=False, separators=(",", ":"))


def short_enum_name(enum: Enum, number: int) -> str:
    """Returns an enum value as people write it: MERGE_RULE_RDA is "rda"; a number that is not known stays a number."""
    value = enum.values_by_number.get(number)
    return str(number) if value is None else str(value.name).removeprefix(_prefix(enum)).lower()


def enum_number(enum: Enum, text: str) -> int:
    """Returns the number of the enum value that people write as `text`.

    Raises:
        ValueError: there is none; the message lists what there is.
    """
    known: dict[str, int] = {
        short_enum_name(enum, value.number): value.number for value in enum.values if value.number != 0
    }
    if text.lower() not in known:
        raise ValueError(f"value is not known. value={text!r}, known={', '.join(known)}")
    return known[text.lower()]


def is_map(field: Field) -> bool:
    """True for a map field."""
    return field.message_type is not None and bool(field.message_type.GetOptions().map_entry)


def is_duration(field: Field) -> bool:
    """True for a field of google.protobuf.Duration."""
    return field.message_type is not None and bool(field.message_type.full_name == Duration.DESCRIPTOR.full_name)


def _value(field: Field, value: Any) -> Any:
    if field.enum_type is not None:
        return short_enum_name(field.enum_type, value)
    if isinstance(value, Duration):
        return value.ToTimedelta().total_seconds()
    if isinstance(value, Timestamp):
        return value.ToJsonString()
    if isinstance(value, Message):
        return to_json(value)
    return value.hex() if isinstance(value, bytes) else value


def _prefix(enum: Enum) -> str:
    """Returns what all names of an enum start with: the name of its zero, without UNSPECIFIED."""
    return str(enum.values_by_number[0].name).removesuffix("UNSPECIFIED")
