"""A policy with a value that can't be right is refused by the field's name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from skerry.wire.policy import MergeRule, OuterOptimizer, Policy

_WRONG: dict[str, tuple[Any, ...]] = {
    "inner_step_count": ("5", None, True, 2.0, 0),
    "grace_factor": ("x", -1, float("nan"), 1e300),
    "delay_step_count": (-1, 1.5),
    "merge": ("x", None),
    "merge_by_fragment": (5, {"a": "x"}),
    "delta_encoding": ("int4",),
    "pinned_positions": (5, ("x",), (-1,)),
    "enrols_by_run": (1,),
    "outer": (None, {"learning_rate": 9}),
}


@pytest.mark.parametrize("name", _WRONG)
def test_a_policy_says_which_field_can_not_be_right(name: str) -> None:
    for value in _WRONG[name]:
        with pytest.raises(ValueError, match=rf"Policy .*\$\.{name}"):
            Policy(**{name: value})


def test_numbers_of_numpy_and_words_become_pythons_own() -> None:
    policy = Policy(inner_step_count=np.int64(5), grace_factor=np.float64(0.25), merge="mean")  # type: ignore[arg-type]
    assert (type(policy.inner_step_count), type(policy.grace_factor)) == (int, float)
    assert policy == Policy(inner_step_count=5, grace_factor=0.25, merge=MergeRule.MEAN)


def test_what_json_leaves_out_has_its_default() -> None:
    assert Policy.from_json({"quorum_count": 2, "outer": {"momentum": 0.5}}) == Policy(
        quorum_count=2, outer=OuterOptimizer(momentum=0.5)
    )


def test_an_outer_optimizer_says_which_field_can_not_be_right() -> None:
    wrong: dict[str, Any] = {"learning_rate": 0, "momentum": 1.0, "name": "sgd"}
    for name, value in wrong.items():
        with pytest.raises(ValueError, match=rf"OuterOptimizer .*\$\.{name}"):
            OuterOptimizer(**{name: value})
