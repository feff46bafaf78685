"""Policies, encodings and layouts survive their messages."""

from __future__ import annotations

import dataclasses
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skerry.v1 import types_pb2 as v1
from skerry.wire import Codec, Compressor, Encoding, FragmentLayout, TensorSpec
from skerry.wire.messages import (
    encoding_from_message,
    encoding_to_message,
    layouts_from_messages,
    layouts_to_messages,
    pack_layout,
    policy_from_message,
    policy_to_message,
    to_values,
    unpack_layout,
)
from skerry.wire.policy import Gate, MergeRule, OuterName, OuterOptimizer, OuterSchedule, Policy

encodings = st.builds(
    Encoding,
    codec=st.sampled_from([Codec.INT8, Codec.INT4]),
    block=st.integers(16, 4096),
    vector_codec=st.sampled_from(Codec),
    compressor=st.sampled_from(Compressor),
)


def test_values_are_words_seconds_hexadecimal_and_iso_times() -> None:
    version = v1.FragmentVersion(fragment="head", version=3, digest=b"\x01\xff")
    policy = v1.Policy(merge_by_fragment={"head": v1.MERGE_RULE_MEAN}, pinned_positions=[4])
    policy.lease_term.FromMilliseconds(2500)
    run = v1.Run(status=v1.RUN_STATUS_CLOSING, versions=[version], policy=policy)
    run.created_at.FromSeconds(1_790_000_000)
    values = to_values(run)
    assert (values["status"], values["created_at"]) == ("closing", "2026-09-21T14:13:20Z")
    assert values["versions"] == [{"fragment": "head", "version": 3, "digest": "01ff"}]
    assert values["policy"] == {
        "merge": "unspecified",
        "merge_by_fragment": {"head": "mean"},
        "lease_term_s": 2.5,
        "pinned_positions": [4],
    }
    assert to_values(v1.Event(position=7)) == {"position": 7}, "what is absent"
    assert to_values(v1.Run(status=99))["status"] == "99", "a later version's"  # type: ignore[arg-type]  # from the wire


def test_a_policy_survives_its_message() -> None:
    encoding = Encoding(Codec.INT8, 128, Codec.INT4, Compressor.NONE)
    policy = Policy(
        inner_step_count=7,
        quorum_count=3,
        grace_factor=0.25,
        outer=OuterOptimizer(OuterName.NESTEROV, 0.7, 0.9, OuterSchedule.CONSTANT),
        merge=MergeRule.MEAN,
        merge_by_fragment={"a": MergeRule.RDA},
        max_staleness=0,
        delta_encoding=encoding,
        update_encoding=Encoding(Codec.FLOAT32),
        quarantine_ratio=0.0,
        lease_term_s=0.125,
        snapshot_ratio=2.0,
        planned_token_count=10**18,
        kept_version_count=9,
        kept_hours=2.0,
        kept_day_count=0,
        pinned_positions=(4, 9),
        enrols_by_run=True,
        gate=Gate("eval", "loss", 0.1, 3, rolls_back=True, higher_is_better=True),
    )
    assert policy_from_message(policy_to_message(policy, has_derived=False), Policy()) == policy
    complete = policy_from_message(policy_to_message(policy), Policy())
    assert complete == dataclasses.replace(policy, delay_step_count=3)
    unchanged = [name for name, value in vars(policy).items() if value == getattr(Policy(), name)]
    assert unchanged == ["delay_step_count"], "every other field is tried"


def test_absent_fields_keep_their_value_and_zero_is_a_value() -> None:
    base = Policy(inner_step_count=7, quarantine_ratio=9.0, merge_by_fragment={"a": MergeRule.MEAN})
    changed = policy_from_message(v1.Policy(quarantine_ratio=0.0), base)
    assert changed == dataclasses.replace(base, quarantine_ratio=0.0)


def test_merge_rules_change_fragment_by_fragment() -> None:
    base = Policy(merge_by_fragment={"a": MergeRule.MEAN, "b": MergeRule.MEAN})
    changes = v1.Policy(merge_by_fragment={"a": v1.MERGE_RULE_UNSPECIFIED, "c": v1.MERGE_RULE_RDA})
    assert policy_from_message(changes, base).merge_by_fragment == {"b": MergeRule.MEAN, "c": MergeRule.RDA}


@pytest.mark.parametrize(
    "message",
    [
        v1.Policy(outer=v1.OuterOptimizer(learning_rate=0.0)),
        v1.Policy(outer=v1.OuterOptimizer(name="adam", learning_rate=0.5)),
        v1.Policy(merge=99),  # type: ignore[arg-type]  # a later version's
        v1.Policy(delta_encoding=v1.Encoding(codec=v1.CODEC_INT4, block=8)),
        v1.Policy(delta_encoding=v1.Encoding(codec=v1.CODEC_UNSPECIFIED)),
    ],
)
def test_values_out_of_range_are_refused(message: v1.Policy) -> None:
    with pytest.raises(ValueError, match=r"."):
        policy_from_message(message, Policy())


@given(encodings)
def test_an_encoding_survives_its_message(encoding: Encoding) -> None:
    assert encoding_from_message(encoding_to_message(encoding)) == encoding


def test_layouts_survive_their_messages() -> None:
    layouts = (FragmentLayout("one", (TensorSpec("a", (2, 3)), TensorSpec("b", ()))),)
    found, dtypes = layouts_from_messages(*layouts_to_messages(layouts, {"a": "bfloat16"}))
    assert found == layouts
    assert dtypes == {"a": "bfloat16", "b": "float32"}


def _layout_of(tensor_count: int) -> v1.Run:
    names = [f"model.layers.{number // 768}.mlp.experts.{number}.gate_proj.weight" for number in range(tensor_count)]
    return v1.Run(
        name="moe",
        tensors=[v1.Tensor(name=name, shape=[2048, 7168], dtype="bfloat16") for name in names],
        fragments=[v1.Fragment(name="f", tensors=names)],
        untrained=[v1.UntrainedTensor(name="bias", dtype="uint8")],
    )


@pytest.mark.parametrize("tensor_count", [100, 44_544])
def test_the_tensors_of_a_large_model_are_packed_and_unpacked(tensor_count: int) -> None:
    message, expected = _layout_of(tensor_count), _layout_of(tensor_count)
    pack_layout(message)
    assert (message != expected) == (tensor_count > 100)
    assert message.ByteSize() < 2**19
    unpack_layout(message)
    assert message == expected


@pytest.mark.parametrize(
    "packed",
    [
        b"no zlib",
        zlib.compress(b"no layout"),
        zlib.compress(_layout_of(9).SerializeToString())[:-9],
        zlib.compress(bytes(2**27)),
    ],
)
def test_what_can_not_be_unpacked_is_refused(packed: bytes) -> None:
    with pytest.raises(ValueError, match="packed_layout"):
        unpack_layout(v1.Run(packed_layout=packed))


@pytest.mark.parametrize(
    ("names", "fragments"),
    [
        (["a", "b"], [("f", ["a"])]),
        (["a"], [("f", ["a"]), ("g", ["a"])]),
        (["a"], [("f", ["a", "x"])]),
        (["a"], [("../f", ["a"])]),
        (["a", "a"], [("f", ["a"])]),
        (["a"], [("f", ["a"]), ("g", [])]),
        ([], []),
    ],
)
def test_what_is_no_partition_is_refused(names: list[str], fragments: list[tuple[str, list[str]]]) -> None:
    tensors = [v1.Tensor(name=name, shape=[1]) for name in names]
    with pytest.raises(ValueError, match=r"."):
        layouts_from_messages(tensors, [v1.Fragment(name=name, tensors=members) for name, members in fragments])
