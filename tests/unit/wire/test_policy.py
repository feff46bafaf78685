"""A policy with a value that can't be right is refused by the field's name."""

from __future__ import annotations

from typing import Any

import pytest

from skerry.wire.policy import OuterOptimizer, Policy

_WRONG: dict[str, tuple[Any, ...]] = {
    "inner_step_count": ("5", None, True, 2.0, 0),
    "grace_factor": ("x", -1, float("nan"), 1e300),
    "delay_step_count": (-1, 1.5),
    "merge": ("x", None),
    "merge_by_fragment": (5, {"a": "x"}),
    "delta_encoding": ("int4",),
    "pinned_positions": (5, ("x",), (-1,)),
    "enrols_by_run": (1,),
    "outer": (None, {"learning_rate": 1}),
}


@pytest.mark.parametrize("name", _WRONG)
def test_a_policy_says_which_field_can_not_be_right(name: str) -> None:
    for value in _WRONG[name]:
        with pytest.raises(ValueError, match=f"field={name}"):
            Policy(**{name: value})


def test_an_outer_optimizer_says_which_field_can_not_be_right() -> None:
    wrong: dict[str, Any] = {"learning_rate": 0, "momentum": 1.0, "name": "sgd"}
    for name, value in wrong.items():
        with pytest.raises(ValueError, match=f"field=outer.{name}"):
            OuterOptimizer(**{name: value})
