"""A policy as a person writes it on the command line."""

from __future__ import annotations

from dataclasses import replace

import pytest

from skerry.cli import policy_text
from skerry.wire.codecs import Codec
from skerry.wire.policy import MergeRule, OuterOptimizer, Policy


def test_only_what_is_assigned_changes() -> None:
    policy = Policy(quorum_count=3)
    changed = policy_text.apply(["inner_step_count=30", "merge=mean", "lease_term_s=2.5"], policy)
    assert changed == replace(policy, inner_step_count=30, merge=MergeRule.MEAN, lease_term_s=2.5)


def test_one_rate_of_the_outer_optimizer_keeps_the_others() -> None:
    outer = OuterOptimizer(learning_rate=0.8, momentum=0.7)
    changed = policy_text.apply(["outer.learning_rate=0.4"], Policy(outer=outer))
    assert changed.outer == replace(outer, learning_rate=0.4)


def test_a_fragments_merge_rule_is_named_after_the_fragment_dots_and_all() -> None:
    policy = policy_text.apply(["merge_by_fragment.block.0=rda"], Policy())
    assert dict(policy.merge_by_fragment) == {"block.0": MergeRule.RDA}


def test_a_new_run_gets_the_defaults_with_what_is_assigned() -> None:
    assert policy_text.apply([], Policy()) == Policy()
    policy = policy_text.apply(["delta_encoding.codec=int8", "merge_by_fragment.embedding=mean"], Policy())
    assert policy.delta_encoding.codec is Codec.INT8
    assert policy.update_encoding.codec is Codec.INT4
    assert policy.merge_rule("embedding") is MergeRule.MEAN


def test_what_is_shown_can_be_set() -> None:
    shown = Policy(
        inner_step_count=30,
        delay_step_count=12,
        merge_by_fragment={"embedding": MergeRule.MEAN},
        lease_term_s=7.0,
        planned_step_count=5000,
        enrols_by_run=True,
    )
    assert policy_text.apply([f"{name}={value}" for name, value in policy_text.rows(shown)], Policy()) == shown


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("inner_step_count", "NAME=VALUE"),
        ("inner_steps=3", "no such field"),
        ("inner_step_count=2.5", "int"),
        ("inner_step_count=many", "inner_step_count"),
        ("kept_hours=nan", "kept_hours"),
        ("enrols_by_run=perhaps", "bool"),
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


def test_a_value_out_of_its_range_is_refused_before_anything_is_sent() -> None:
    with pytest.raises(ValueError, match="quorum_count"):
        policy_text.apply(["quorum_count=0"], Policy())
