"""A policy as it is written on the command line: `--set inner_step_count=30 --set outer.learning_rate=0.4`.

Names are the contract's (message Policy in skerry/v1/types.proto), with a dot into an inner message and into
`merge_by_fragment`; durations are seconds, with `_s` or without.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from typing import Any

from skerry.wire.messages import policy_from_message, policy_to_message
from skerry.wire.policy import Policy


def apply(assignments: Iterable[str], policy: Policy) -> Policy:
    """Returns `policy` with the fields that were assigned.

    Raises:
        ValueError: an assignment that is not NAME=VALUE, an unknown name, or a value that is not legal.
    """
    values = policy.to_json()
    for assignment in assignments:
        name, sign, text = assignment.partition("=")
        if not sign:
            raise ValueError(f"not of the form NAME=VALUE. given={assignment[:80]!r}")
        _assign(values, name.strip(), text.strip())
    wanted = Policy.from_json(values, is_text=True)
    policy_from_message(policy_to_message(wanted), Policy())  # what the contract allows is less
    return wanted


def rows(policy: Policy) -> Iterator[tuple[str, str]]:
    """Yields every field of a policy as the name and value that `--set` takes."""
    yield from _flatten(to_json(policy), "")


def to_json(policy: Policy) -> dict[str, Any]:
    """Returns a policy as JSON values, every field under its name in the contract."""
    return policy.to_json() | {"delay_step_count": policy.tau}


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
        values[field] = {**values[field], rest: _value(values["merge"], text)}
    elif isinstance(part, dict) and rest in part:
        part[rest] = _value(part[rest], text)
    elif isinstance(part, tuple):
        values[field] = tuple(filter(None, text.split(",")))
    elif field not in values or isinstance(part, dict):
        raise ValueError(f"policy has no such field. name={name[:80]!r}, known={', '.join(part or values)}")
    elif rest:
        raise ValueError(f"field has no parts. name={name}")
    else:
        values[field] = _value(part, text.removesuffix("s") if field.endswith("_s") else text)


def _value(current: Any, text: str) -> str:
    """Returns the text for a field whose value is `current`, as `Policy.from_json` reads it."""
    if not isinstance(current, StrEnum):
        return text
    known = list(map(str, type(current)))
    if (member := text.lower().replace("_", "-")) not in known:
        raise ValueError(f"value is not known. value={text[:80]!r}, known={', '.join(known)}")
    return member
