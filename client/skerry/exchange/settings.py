"""How a learner takes part in a run, and the checks of what a training loop gives."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from operator import index
from typing import Any, Final

from skerry.wire.layout import check_name
from skerry.wire.policy import Policy

_MOST_COUNTED: Final = 2**53  # what every language counts exactly
_LONGEST_TIMEOUT_S: Final = 1e9


@dataclass(frozen=True)
class ExchangeSettings:
    """How a learner takes part in a run.

    Raises:
        ValueError: a name is not legal, or a number is out of its range.
    """

    run: str
    learner_id: str
    region: str = ""
    create: bool = False  # the run, where it does not exist
    policy: Policy | None = None  # policy of a run that this learner creates; an existing run keeps its own
    fragment_count: int | None = None  # of a run that this learner creates
    allow_other_frozen: bool | Collection[str] = False
    connect_timeout_s: float = 30.0
    session_id: str = ""  # by default one of its own

    def __post_init__(self) -> None:
        """Checks names and ranges."""
        check_name(self.run, "run")
        check_name(self.learner_id, "learner")
        if self.region:
            check_name(self.region, "region")
        check_timeout(self.connect_timeout_s, "connect_timeout_s")
        if self.fragment_count is not None and index(self.fragment_count) < 1:
            raise ValueError(f"fragment_count must be at least 1. fragment_count={self.fragment_count}")


def check_policy(policy: object) -> None:
    """Checks what a caller gave as a policy.

    Raises:
        TypeError: it is something else, and not None.
    """
    if policy is not None and not isinstance(policy, Policy):
        raise TypeError("policy must be a skerry.Policy; of a dict make one by Policy.from_json(values)")


def check_timeout(timeout_s: float, name: str) -> None:
    """Checks a time that a caller gave to wait for.

    Raises:
        ValueError: it is no number of seconds that anybody waits for; the message says `name`.
    """
    if not 0 < timeout_s <= _LONGEST_TIMEOUT_S:
        raise ValueError(f"{name} must be above 0 and at most {_LONGEST_TIMEOUT_S:g}. {name}={timeout_s}")


def whole_number(value: Any, name: str) -> int:
    """Returns a count that a training loop gave: an integer, or what holds one, as `mask.sum()` does.

    A tensor on a device is waited for.

    Raises:
        ValueError: it is no whole number, or beyond 2^53.
    """
    number = value.item() if hasattr(value, "item") else value
    is_number = isinstance(number, int | float) and not isinstance(number, bool)
    if not (is_number and abs(number) <= _MOST_COUNTED and number == int(number)):
        raise ValueError(f"{name} must be a whole number of at most 2^53: a sum, not a mean. {name}={value!r}")
    return int(number)
