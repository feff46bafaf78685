"""A policy as a person writes it on the command line: `--set inner_step_count=30 --set outer.learning_rate=0.4`.

Names are the contract's (message Policy in skerry/v1/types.proto), with a dot into an inner message and into
`merge_by_fragment`; durations are seconds, with `_s` or without.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from skerry.cli import plain
from skerry.v1 import types_pb2 as v1
from skerry.wire import messages
from skerry.wire.policy import Policy


def apply(assignments: Iterable[str], policy: v1.Policy) -> v1.Policy:
    """Returns a policy with only the fields that were assigned, each inner message completed from `policy`.

    The contract replaces an inner message as a whole, so that one rate of the outer optimizer takes the others with it;
    merge rules it replaces one by one.

    Raises:
        ValueError: an assignment that is not NAME=VALUE, an unknown name, or a value of the wrong kind.
    """
    changes = v1.Policy()
    for assignment in assignments:
        name, sign, text = assignment.partition("=")
        if not sign:
            raise ValueError(f"not of the form NAME=VALUE. given={assignment!r}")
        head, _, rest = name.strip().partition(".")
        field = _field(changes, head)
        if field.message_type is None or plain.is_duration(field):
            if rest:
                raise ValueError(f"field has no parts. name={name}")
            _assign(changes, field, text)
        elif plain.is_map(field):
            _assign_in_map(changes, field, rest, text)
        else:
            inner = getattr(changes, head)
            if head not in {known.name for known, _ in changes.ListFields()}:
                inner.CopyFrom(getattr(policy, head))
            _assign(inner, _field(inner, rest), text)
    return changes


def complete(assignments: Iterable[str]) -> Policy:
    """Returns the default policy with the fields that were assigned: what a new run gets.

    Raises:
        ValueError: as `apply`, or a value out of its range.
    """
    policy = Policy()
    standard = messages.policy_to_message(policy, has_derived=False)
    return messages.policy_from_message(apply(assignments, standard), policy)


def rows(policy: v1.Policy) -> Iterator[tuple[str, str]]:
    """Yields every field of a policy as the name and value that `--set` takes."""
    yield from _flatten(plain.to_json(policy), "")


def _flatten(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", f"{value:g}" if isinstance(value, float) else str(value)


def _field(message: Message, name: str) -> plain.Field:
    fields = message.DESCRIPTOR.fields_by_name
    found = fields.get(name)
    if found is None and name.endswith("_s"):
        found = fields.get(name.removesuffix("_s"))
        found = found if found is not None and plain.is_duration(found) else None
    if found is None:
        raise ValueError(f"policy has no such field. name={name!r}, known={', '.join(fields)}")
    return found


def _assign(message: Message, field: plain.Field, text: str) -> None:
    if plain.is_duration(field):
        seconds = _number(field.name, text.removesuffix("s"))
        getattr(message, field.name).FromTimedelta(timedelta(seconds=seconds))
        return
    setattr(message, field.name, _scalar(field, text.strip()))


def _assign_in_map(changes: v1.Policy, field: plain.Field, key: str, text: str) -> None:
    if not key:
        raise ValueError(f"name a fragment: {field.name}.FRAGMENT=VALUE")
    getattr(changes, field.name)[key] = _scalar(field.message_type.fields_by_name["value"], text.strip())


def _scalar(field: plain.Field, text: str) -> int | float | str:
    if field.enum_type is not None:
        return plain.enum_number(field.enum_type, text)
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
