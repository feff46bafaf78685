"""Quantities with units, and learners with fields, as they are written on the command line: `us:step=1.1,count=2`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, TypeAlias

from skerry.wire.layout import check_name

# By name of a field, its attribute and what reads its value.
Fields: TypeAlias = Mapping[str, tuple[str, Callable[[str], Any]]]

_HIGHEST: Final = 1e18
_SCALES: Final = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_SECONDS: Final = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_NUMBER: Final = r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?)"


def quantity(text: str, unit: str = "") -> float:
    """Returns a positive number; "2Gbit" is 2e9 where the unit is "bit"."""
    return _scaled(
        text, rf"([kMGT]?){unit}(?:/s)?", _SCALES, f"number{f' of {unit}, such as 2G{unit}' if unit else ''}"
    )


bits = partial(quantity, unit="bit")


def seconds(text: str) -> float:
    """Returns a positive time: "30m" is 1800."""
    return _scaled(text, r"([smhd]?)", _SECONDS, "time, such as 90s, 30m, 2h or 1d")


def _scaled(text: str, suffix: str, scales: Mapping[str, float], kind: str) -> float:
    match = re.fullmatch(_NUMBER + suffix, text.strip(), re.ASCII)
    value = float(match[1]) * scales[match[2]] if match else 0.0
    if not 0 < value <= _HIGHEST:
        raise ValueError(f"{text[:40]!r} is no positive {kind}")
    return value


def field_values(text: str, known: Fields) -> dict[str, Any]:
    """Returns the values of "step=1.1,bandwidth=2Gbit" by attribute."""
    values = {}
    for item in text.split(","):
        name, has_value, value = item.partition("=")
        if name not in known or not has_value:
            raise ValueError(f"{item[:40]!r} is none of {', '.join(f'{field}=…' for field in known)}")
        attribute, parse = known[name]
        values[attribute] = parse(value)
    return values


def named_fields(text: str, known: Fields) -> tuple[str, dict[str, Any]]:
    """Returns the name and the values of "us:step=1.1,bandwidth=2Gbit"."""
    name, _, rest = text.partition(":")
    return check_name(name, kind="learner"), field_values(rest, known)
