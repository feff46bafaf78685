"""Administering runs from a script, against a real syncer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from skerry import MergeRule, Policy, RunsClient

ARRAYS = {"embedding.weight": np.ones((300, 8), np.float32), "body.bias": np.zeros(8, np.float32)}


def test_a_policy_changes_in_what_differs_whatever_others_changed_meanwhile(target: str) -> None:
    with RunsClient(target) as one, RunsClient(target) as other:
        one.create_run("fit", ARRAYS, policy=Policy(merge_by_fragment={"embedding": MergeRule.RDA}))
        seen = one.get_policy("fit")
        other.set_policy("fit", replace(seen, quorum_count=2), base=seen)
        changed = one.set_policy("fit", replace(seen, inner_step_count=9, merge_by_fragment={}), base=seen)
        assert (changed.quorum_count, changed.inner_step_count, changed.merge_by_fragment) == (2, 9, {})
        assert one.set_policy("fit", seen, base=seen) == changed, "nothing differs"
        assert replace(one.set_policy("fit", Policy()), delay_step_count=None) == Policy()


def test_metrics_of_a_position_are_reported(target: str) -> None:
    with RunsClient(target) as client:
        created = client.create_run("fit", ARRAYS)
        report = client.report_metrics("fit", {"held_out_loss": 3.25}, judge="eval", position=created.position)
        assert (report.judge, dict(report.metrics)) == ("eval", {"held_out_loss": 3.25})
        assert list(client.get_run("fit").reports) == [report]


def test_versions_are_listed_down_to_the_first_however_few_an_answer_holds(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skerry_syncer.rpc.runs._PAGE_BYTES", 1)
    with RunsClient(target) as client:
        assert client.capabilities().api_version
        created = client.create_run("fit", ARRAYS)
        for _ in range(3):
            client.roll_back("fit", created.position)
        records = client.list_versions("fit", "embedding")
        assert [record.version.version for record in records] == [3, 2, 1, 0]
