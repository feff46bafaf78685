"""Messages of `skerry.v1` as plain JSON values, the same in every command's `--json`.

Field names are the contract's. What a message leaves out is left out; every other field is there, also at its default.
Digests are hexadecimal, enum values lower-case words, durations seconds under a name that ends in `_s`, timestamps ISO
8601. A float that is not finite, such as a loss that diverged, is null, since JSON has no word for it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, MutableSequence
from typing import Any

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from skerry.cli import policy_text
from skerry.exchange.session import policy_of
from skerry.v1 import types_pb2
from skerry.wire.messages import enum_word
from skerry.wire.policy import Policy


def to_json(message: Message) -> dict[str, Any]:
    """Returns a message as JSON values."""
    if isinstance(message, types_pb2.Policy):
        return policy_text.to_json(policy_of(message, Policy()))
    values: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        if field.has_presence and not message.HasField(field.name):
            continue
        value: Any = getattr(message, field.name)
        name = f"{field.name}_s" if isinstance(value, Duration) else field.name
        if isinstance(value, MutableSequence):
            values[name] = [_value(field.enum_type, item) for item in value]
        else:
            values[name] = _value(field.enum_type, value)
    return values


def to_line(values: Mapping[str, Any] | Iterable[Any]) -> str:
    """Returns JSON values as one line."""
    return json.dumps(values, allow_nan=False, separators=(",", ":"))


def _value(enum: Any, value: Any) -> Any:
    if enum is not None:
        return enum_word(enum, value)
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Duration):
        return value.seconds + value.nanos / 1e9
    if isinstance(value, Timestamp):
        return value.ToJsonString()
    return to_json(value) if isinstance(value, Message) else value
