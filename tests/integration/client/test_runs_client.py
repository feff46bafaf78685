"""Administering runs from a script, against a real syncer."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

from skerry import ArrayLearner, MergeRule, Policy, RefusedError, RunsClient, StopExchangingError
from tests.support.quadratic import QUICK, Quadratic, train_until

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


def test_a_learner_that_is_ejected_stops_at_once_and_comes_back_when_it_is_readmitted(target: str) -> None:
    problem = Quadratic()
    with RunsClient(target) as client:

        def learner() -> ArrayLearner:
            arrays = problem.arrays
            return ArrayLearner(arrays, target=target, run="fit", learner_id="us", create=True, policy=QUICK)

        with learner() as us:
            train_until([(problem, us)], lambda: min(us.stats.versions.values(), default=0) > 0)
            with pytest.raises(RefusedError, match="known=us"):
                client.eject("fit", "eu")
            assert client.eject("fit", "us").is_ejected
            train_until([(problem, us)], lambda: us.stats.failure is not None)
            us.step(tokens=8, loss=problem.descend())  # it trains on, alone
        assert us.stats.failure is not None
        assert us.stats.failure.reason == "EJECTED"
        began_s = time.monotonic()
        with pytest.raises(StopExchangingError, match="skerry runs readmit fit us"):
            learner()
        assert time.monotonic() - began_s < 10, "it is final, and not tried again until connect_timeout_s"
        assert not client.readmit("fit", "us").is_ejected
        with learner() as us:
            merged = min(us.stats.versions.values())
            train_until([(problem, us)], lambda: min(us.stats.versions.values()) > merged)
