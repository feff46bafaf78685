"""A policy as a person writes it on the command line."""

from __future__ import annotations

import pytest

from skerry.cli import policy_text
from skerry.v1 import types_pb2 as v1
from skerry.wire.codecs import Codec
from skerry.wire.policy import MergeRule, Policy


def test_only_what_is_assigned_changes() -> None:
    changes = policy_text.apply(["inner_step_count=30", "merge=mean", "lease_term_s=2.5"], v1.Policy(quorum_count=3))
    assert changes.inner_step_count == 30
    assert changes.merge == v1.MERGE_RULE_MEAN
    assert changes.lease_term.ToTimedelta().total_seconds() == 2.5
    assert not changes.HasField("quorum_count")


def test_one_rate_of_the_outer_optimizer_keeps_the_others() -> None:
    current = v1.Policy(outer=v1.OuterOptimizer(name="nesterov", learning_rate=0.8, momentum=0.9))
    changes = policy_text.apply(["outer.learning_rate=0.4"], current)
    assert (changes.outer.name, changes.outer.learning_rate, changes.outer.momentum) == ("nesterov", 0.4, 0.9)


def test_a_fragments_merge_rule_is_named_after_the_fragment_dots_and_all() -> None:
    changes = policy_text.apply(["merge_by_fragment.block.0=rda"], v1.Policy())
    assert dict(changes.merge_by_fragment) == {"block.0": v1.MERGE_RULE_RDA}


def test_a_new_run_gets_the_defaults_with_what_is_assigned() -> None:
    assert policy_text.complete([]) == Policy()
    policy = policy_text.complete(["delta_encoding.codec=int8", "merge_by_fragment.embedding=mean"])
    assert policy.delta_encoding.codec is Codec.INT8
    assert policy.update_encoding.codec is Codec.INT4
    assert policy.merge_rule("embedding") is MergeRule.MEAN


def test_what_is_shown_can_be_set() -> None:
    policy = policy_text.apply([f"{name}={value}" for name, value in policy_text.rows(_full_policy())], v1.Policy())
    assert policy == _full_policy()


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("inner_step_count", "NAME=VALUE"),
        ("inner_steps=3", "no such field"),
        ("inner_step_count=2.5", "whole number"),
        ("inner_step_count=many", "number is wanted"),
        ("merge=median", "known=mean, rda"),
        ("outer.rate=1", "no such field"),
        ("merge_by_fragment=mean", "name a fragment"),
        ("quorum_count.x=1", "no parts"),
    ],
)
def test_a_wrong_assignment_says_what_is_wrong(assignment: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        policy_text.apply([assignment], v1.Policy())


def test_a_value_out_of_its_range_is_refused_before_anything_is_sent() -> None:
    with pytest.raises(ValueError, match="quorum_count"):
        policy_text.complete(["quorum_count=0"])


def _full_policy() -> v1.Policy:
    encoding = v1.Encoding(
        codec=v1.CODEC_INT4, block=128, vector_codec=v1.CODEC_BFLOAT16, compressor=v1.COMPRESSOR_ZSTD
    )
    policy = v1.Policy(
        inner_step_count=24,
        delay_step_count=12,
        quorum_count=1,
        grace_factor=0.5,
        outer=v1.OuterOptimizer(name="nesterov", learning_rate=0.8, momentum=0.9, schedule=v1.OUTER_SCHEDULE_CONSTANT),
        merge=v1.MERGE_RULE_RDA,
        merge_by_fragment={"embedding": v1.MERGE_RULE_MEAN},
        staleness_exponent=0.5,
        max_staleness=8,
        weight_cap=2.0,
        delta_encoding=encoding,
        update_encoding=encoding,
        quarantine_ratio=30,
        snapshot_ratio=1,
        planned_step_count=5000,
    )
    policy.lease_term.FromMilliseconds(15_000)
    return policy
