"""Records as plain JSON values, the same in every command's `--json`.

Field names are the contract's. What a record leaves out is left out; every other field is there, also at its default.
Digests are hexadecimal, enum values lower-case words, durations seconds under a name that ends in `_s`, timestamps ISO
8601. A float that is not finite, such as a loss that diverged, is null, since JSON has no word for it.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

from google.protobuf.timestamp_pb2 import Timestamp

from skerry.cli import policy_text
from skerry.wire.policy import Policy

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def to_json(record: DataclassInstance) -> dict[str, Any]:
    """Returns a record of `skerry.net.records`, or a policy, as JSON values."""
    if isinstance(record, Policy):
        return policy_text.to_json(record)
    values = ((field.name, getattr(record, field.name)) for field in dataclasses.fields(record))
    return {name: _value(value) for name, value in values if value is not None}


def to_line(values: Mapping[str, Any] | Iterable[Any]) -> str:
    """Returns JSON values as one line."""
    return json.dumps(values, allow_nan=False, separators=(",", ":"))


def _value(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_value(item) for item in value]
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, datetime):
        stamp = Timestamp()
        stamp.FromDatetime(value)
        return stamp.ToJsonString()
    return to_json(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value
