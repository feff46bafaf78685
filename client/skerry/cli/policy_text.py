"""A policy as it is written on the command line: `--set inner_step_count=30 --set outer.learning_rate=0.4`.

Names are the contract's (message Policy in skerry/v1/types.proto), with a dot into an inner message and into
`merge_by_fragment`; durations are seconds, with `_s` or without.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from typing import Any, TypeAlias

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from skerry.v1 import types_pb2 as v1
from skerry.wire.messages import policy_from_message, policy_to_message
from skerry.wire.policy import Policy

# Descriptors come from either of two implementations, whose classes have no common name for the type checker.
Field: TypeAlias = Any
Enum: TypeAlias = Any


def apply(assignments: Iterable[str], policy: Policy) -> Policy:
    """Returns `policy` with the fields that were assigned.

    Raises:
        ValueError: an assignment that is not NAME=VALUE, an unknown name, or a value that is not legal.
    """
    message = policy_to_message(policy, has_derived=False)
    for assignment in assignments:
        name, sign, text = assignment.partition("=")
        if not sign:
            raise ValueError(f"not of the form NAME=VALUE. given={assignment!r}")
        head, _, rest = name.strip().partition(".")
        field = _field(message, head)
        if field.message_type is None or _is_duration(field):
            if rest:
                raise ValueError(f"field has no parts. name={name}")
            _assign(message, field, text)
        elif _is_map(field):
            _assign_in_map(message, field, rest, text)
        else:
            inner = getattr(message, head)
            _assign(inner, _field(inner, rest), text)
    return policy_from_message(message, policy)


def rows(policy: Policy) -> Iterator[tuple[str, str]]:
    """Yields every field of a policy as the name and value that `--set` takes."""
    yield from _flatten(to_json(policy), "")


def to_json(policy: Policy) -> dict[str, Any]:
    """Returns a policy as JSON values, every field under its name in the contract."""
    return _message_to_json(policy_to_message(policy))


def _flatten(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", f"{value:g}" if isinstance(value, float) else str(value)


def _field(message: Message, name: str) -> Field:
    fields = message.DESCRIPTOR.fields_by_name
    found = fields.get(name)
    if found is None and name.endswith("_s"):
        found = fields.get(name.removesuffix("_s"))
        found = found if found is not None and _is_duration(found) else None
    if found is None:
        raise ValueError(f"policy has no such field. name={name!r}, known={', '.join(fields)}")
    return found


def _assign(message: Message, field: Field, text: str) -> None:
    if _is_duration(field):
        seconds = _number(field.name, text.removesuffix("s"))
        getattr(message, field.name).FromTimedelta(timedelta(seconds=seconds))
        return
    setattr(message, field.name, _scalar(field, text.strip()))


def _assign_in_map(message: v1.Policy, field: Field, key: str, text: str) -> None:
    if not key:
        raise ValueError(f"name a fragment: {field.name}.FRAGMENT=VALUE")
    getattr(message, field.name)[key] = _scalar(field.message_type.fields_by_name["value"], text.strip())


def _scalar(field: Field, text: str) -> int | float | str:
    if field.enum_type is not None:
        return _enum_number(field.enum_type, text)
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return text
    number = _number(field.name, text)
    if field.cpp_type == FieldDescriptor.CPPTYPE_DOUBLE:
        return number
    if not number.is_integer():
        raise ValueError(f"a whole number is wanted. name={field.name}, value={text!r}")
    return int(number)


def _number(name: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"a number is wanted. name={name}, value={text!r}")
    return number


def _message_to_json(message: Message) -> dict[str, Any]:
    result: dict[str, Any] = {}
    field: Field
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if _is_map(field):
            values = field.message_type.fields_by_name["value"]
            result[field.name] = {str(key): _value(values, value[key]) for key in sorted(value)}
        else:
            result[field.name + ("_s" if _is_duration(field) else "")] = _value(field, value)
    return result


def _value(field: Field, value: Any) -> Any:
    if field.enum_type is not None:
        return _word(field.enum_type, value)
    if isinstance(value, Duration):
        return value.ToTimedelta().total_seconds()
    return _message_to_json(value) if isinstance(value, Message) else value


def _word(enum: Enum, number: int) -> str:
    """Returns an enum value as people write it: MERGE_RULE_RDA is "rda"."""
    prefix = str(enum.values_by_number[0].name).removesuffix("UNSPECIFIED")
    return str(enum.values_by_number[number].name).removeprefix(prefix).lower()


def _enum_number(enum: Enum, text: str) -> int:
    known: dict[str, int] = {_word(enum, value.number): value.number for value in enum.values if value.number != 0}
    if text.lower() not in known:
        raise ValueError(f"value is not known. value={text!r}, known={', '.join(known)}")
    return known[text.lower()]


def _is_map(field: Field) -> bool:
    return field.message_type is not None and bool(field.message_type.GetOptions().map_entry)


def _is_duration(field: Field) -> bool:
    return field.message_type is not None and bool(field.message_type.full_name == Duration.DESCRIPTOR.full_name)
