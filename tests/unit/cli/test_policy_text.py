"""A policy as a person writes it on the command line."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from skerry.cli import policy_text
from skerry.wire.codecs import Codec, Encoding
from skerry.wire.policy import Gate, MergeRule, OuterOptimizer, Policy

OUTER = OuterOptimizer(learning_rate=0.9, momentum=0.7)
POLICY = Policy(quorum_count=3, outer=OUTER)


@pytest.mark.parametrize(
    ("assignments", "changes"),
    [
        (["inner_step_count=30", "lease_term_s=2.5"], {"inner_step_count": 30, "lease_term_s": 2.5}),
        (["merge=mean", "lease_term=7s"], {"merge": MergeRule.MEAN, "lease_term_s": 7.0}),
        (["outer.learning_rate=0.4"], {"outer": replace(OUTER, learning_rate=0.4)}),
        (["merge_by_fragment.block.0=rda"], {"merge_by_fragment": {"block.0": MergeRule.RDA}}),
        (["delta_encoding.codec=int8"], {"delta_encoding": Encoding(Codec.INT8)}),
        (["gate.judge=eval", "gate.metric=loss", "gate.margin=0.1"], {"gate": Gate("eval", "loss", 0.1)}),
        ([], {}),
    ],
)
def test_only_what_is_assigned_changes(assignments: list[str], changes: dict[str, Any]) -> None:
    assert policy_text.apply(assignments, POLICY) == replace(POLICY, **changes)


def test_what_is_shown_can_be_set() -> None:
    shown = Policy(
        inner_step_count=30,
        delay_step_count=12,
        merge_by_fragment={"embedding": MergeRule.MEAN},
        lease_term_s=7.0,
        planned_token_count=5000,
        enrols_by_run=True,
        gate=Gate("eval", "loss", rolls_back=True),
    )
    assert policy_text.apply([f"{name}={value}" for name, value in policy_text.rows(shown)], Policy()) == shown


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("inner_step_count", "NAME=VALUE"),
        ("inner_steps=3", "no such field"),
        ("inner_step_count=many", "inner_step_count"),
        ("kept_hours=nan", "kept_hours"),
        ("enrols_by_run=perhaps", "bool"),
        ("gate.metric=Loss %", "metric name is not legal"),
        ("delta_encoding.block=7", "block size is out of range"),
        ("merge=median", "known=mean, rda"),
        ("outer.rate=1", "no such field"),
        ("merge_by_fragment=mean", "name a fragment"),
        ("quorum_count.x=1", "no parts"),
    ],
)
def test_a_wrong_assignment_says_what_is_wrong(assignment: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        policy_text.apply([assignment], Policy())
