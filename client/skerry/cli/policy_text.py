"""A policy as it is written on the command line: `--set inner_step_count=30 --set outer.learning_rate=0.4`.

Names are the contract's (message Policy in skerry/v1/types.proto), with a dot into an inner message and into
`merge_by_fragment`; durations are seconds, with `_s` or without.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from typing import Any

from skerry.wire.messages import policy_from_message, policy_to_message
from skerry.wire.policy import Policy


def apply(assignments: Iterable[str], policy: Policy) -> Policy:
    """Returns `policy` with the fields that were assigned.

    Raises:
        ValueError: an assignment that is not NAME=VALUE, an unknown name, or a value that is not legal.
    """
    values = dataclasses.asdict(policy)
    for assignment in assignments:
        name, sign, text = assignment.partition("=")
        if not sign:
            raise ValueError(f"not of the form NAME=VALUE. given={assignment[:80]!r}")
        _assign(values, name.strip(), text.strip())
    wanted = Policy.from_json(values)
    made = policy_from_message(policy_to_message(wanted, has_derived=False), policy)
    lists: dict[str, Any] = {name: value for name, value in vars(wanted).items() if isinstance(value, tuple)}
    return dataclasses.replace(made, **lists)  # the contract adds to them


def rows(policy: Policy) -> Iterator[tuple[str, str]]:
    """Yields every field of a policy as the name and value that `--set` takes."""
    yield from _flatten(to_json(policy), "")


def to_json(policy: Policy) -> dict[str, Any]:
    """Returns a policy as JSON values, every field under its name in the contract."""
    return dataclasses.asdict(policy) | {"delay_step_count": policy.tau}


def _flatten(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{name}.")
        elif isinstance(value, tuple):
            yield f"{prefix}{name}", ",".join(map(str, value))
        else:
            yield f"{prefix}{name}", f"{value:g}" if isinstance(value, float) else str(value).lower()


def _assign(values: dict[str, Any], name: str, text: str) -> None:
    head, _, rest = name.partition(".")
    field = head if head in values else f"{head}_s"
    part = values.get(field)
    if field == "merge_by_fragment":
        if not rest:
            raise ValueError(f"name a fragment: {field}.FRAGMENT=VALUE")
        values[field] = {**values[field], rest: _parsed(name, values["merge"], text)}
    elif isinstance(part, dict) and rest in part:
        part[rest] = _parsed(name, part[rest], text)
    elif isinstance(part, tuple):
        values[field] = tuple(_parsed(name, 0, one) for one in text.split(",") if one)
    elif field not in values or isinstance(part, dict):
        raise ValueError(f"policy has no such field. name={name[:80]!r}, known={', '.join(part or values)}")
    elif rest:
        raise ValueError(f"field has no parts. name={name}")
    else:
        values[field] = _parsed(name, part, text.removesuffix("s") if field.endswith("_s") else text)


def _parsed(name: str, now: Any, text: str) -> Any:
    """Returns the value that `text` states for a field whose value is `now`."""
    if isinstance(now, Enum):
        known = {str(one.value): one for one in type(now)}
        if (word := text.lower().replace("_", "-")) not in known:
            raise ValueError(f"value is not known. value={text[:80]!r}, known={', '.join(known)}")
        return known[word]
    if isinstance(now, bool):
        if text.lower() not in {"true", "false"}:
            raise ValueError(f"true or false is wanted. name={name}, value={text[:80]!r}")
        return text.lower() == "true"
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"a number is wanted. name={name}, value={text[:80]!r}")
    if isinstance(now, float):
        return number
    if not number.is_integer():
        raise ValueError(f"a whole number is wanted. name={name}, value={text[:80]!r}")
    return int(number)
