"""Administering runs from a script, against a real syncer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from skerry import MergeRule, Policy, RunsClient
from skerry.v1 import types_pb2 as v1
from skerry.v1.exchange_pb2 import WatchStart
from skerry.v1.types_pb2 import Event

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


def test_answers_are_what_the_syncer_says(target: str) -> None:
    with RunsClient(target) as client:
        created = client.create_run("fit", ARRAYS)
        view = client.get_run("fit", uid=created.uid)
        assert (view.run.status, len(view.learners)) == (v1.RUN_STATUS_OPEN, 0)
        assert [tuple(tensor.shape) for tensor in view.run.tensors] == [(300, 8), (8,)]
        assert [run.uid for run in client.list_runs()] == [created.uid]
        (version,) = client.list_versions("fit", view.run.fragments[0].name)
        assert (version.version.version, len(version.merged), version.has_snapshot) == (0, 0, True)
        assert client.capabilities().api_version
        rolled = client.roll_back("fit", created.position)
        assert {version.version for version in rolled.versions} == {1}
        assert client.close_run("fit").status == v1.RUN_STATUS_CLOSED
        watched = client.watch("fit", after_position=1)
        assert isinstance(next(watched), WatchStart)
        kinds = set()
        for event in watched:
            assert isinstance(event, Event)
            kinds.add(event.WhichOneof("kind"))
            if event.status_changed == v1.RUN_STATUS_CLOSED:
                break
        assert "rolled_back" in kinds
        client.delete_run("fit", created.uid)
        assert client.list_runs() == []


def test_versions_are_listed_down_to_the_first_however_few_an_answer_holds(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skerry_syncer.rpc.runs._PAGE_BYTES", 1)
    with RunsClient(target) as client:
        created = client.create_run("fit", ARRAYS)
        for _ in range(3):
            client.roll_back("fit", created.position)
        records = client.list_versions("fit", "embedding")
        assert [record.version.version for record in records] == [3, 2, 1, 0]
