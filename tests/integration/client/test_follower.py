"""Followers of a run against real syncers: the newest weights and those after them, without gaps in their bytes."""

from __future__ import annotations

import itertools
import math
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from skerry import ArrayLearner, Follower, RunsClient, SkerryError
from skerry.follower import Version
from tests.support.quadratic import QUICK, Quadratic, train_until
from tests.support.syncer_thread import syncer


def attached(target: str, problem: Quadratic) -> ArrayLearner:
    return ArrayLearner(problem.arrays, target=target, run="fit", learner_id="us", create=True, policy=QUICK)


def train(problem: Quadratic, learner: ArrayLearner, count: int) -> None:
    """Trains until every fragment has so many more versions, all work is merged, and no version is on its way."""
    goal = min(learner.stats.versions.values()) + count
    train_until([(problem, learner)], lambda: min(learner.stats.versions.values()) >= goal)
    assert learner.flush(30)


def same(version: Version, weights: dict[str, NDArray[np.float32]]) -> bool:
    arrays = version.arrays()
    return arrays.keys() == weights.keys() and all(np.array_equal(arrays[name], weights[name]) for name in arrays)


def test_the_newest_weights_come_first_and_then_each_newer_ones(target: str) -> None:
    problem = Quadratic()
    with attached(target, problem) as learner, RunsClient(target) as client, Follower(target, "fit") as follower:
        positions = []
        for version in itertools.islice(follower, 4):
            assert same(version, dict(client.pull(client.run_at("fit", version.position))))
            assert version.versions == {entry.fragment: entry.version for entry in version.run.versions}
            positions.append(version.position)
            train(problem, learner, 1)
        assert positions == sorted(set(positions))


@pytest.mark.long
def test_late_lagging_and_steady_followers_have_the_same_bytes(target: str) -> None:
    problem = Quadratic()
    with Follower(target, "fit") as steady, Follower(target, "fit") as lagging, RunsClient(target) as client:
        with attached(target, problem) as learner:
            begun = next(iter(lagging))
            before = {name: values.copy() for name, values in begun.arrays().items()}
            for _ in itertools.islice(steady, 12):
                train(problem, learner, 9)
        client.close_run("fit")
        *_, version = steady
        *_, caught_up = lagging
        with Follower(target, "fit") as late:
            (joined,) = late
        assert min(caught_up.versions.values()) - max(begun.versions.values()) >= 100
        assert same(version, joined.arrays())
        assert same(caught_up, joined.arrays())
        assert version.position == joined.position == caught_up.position
        assert same(begun, before), "a version stays as it is while its follower goes on"


def test_metrics_of_a_version_are_reported_by_the_followers_judge(target: str) -> None:
    problem = Quadratic()
    with attached(target, problem), RunsClient(target) as client, Follower(target, "fit", judge="eval") as follower:
        version = next(iter(follower))
        report = version.report(held_out_loss=3.25, score=float("nan"))
        assert (report.position, report.judge, report.metrics["held_out_loss"]) == (version.position, "eval", 3.25)
        assert math.isnan(report.metrics["score"])
        assert [each.position for each in client.get_run("fit").reports] == [version.position]


def test_weights_that_are_not_the_runs_are_replaced_by_a_snapshot(target: str) -> None:
    problem = Quadratic()
    with attached(target, problem) as learner, RunsClient(target) as client, Follower(target, "fit") as follower:
        next(iter(follower))
        for held, _ in follower._held.values():
            held.weights.flags.writeable = True
            np.add(held.weights, 1, out=held.weights)
        train(problem, learner, 1)
        version = next(iter(follower))
        assert same(version, dict(client.pull(version.run)))


def test_versions_are_passed_over_and_the_last_of_a_closed_run_comes_last(target: str) -> None:
    problem = Quadratic()
    with attached(target, problem) as learner, RunsClient(target) as client:
        follower = Follower(target, "fit", every=1000)
        versions = iter(follower)
        first = next(versions)
        train(problem, learner, 3)
        client.close_run("fit")
        (last,) = versions
        assert sum(first.versions.values()) < sum(last.versions.values()) < 1000
        assert same(last, dict(client.pull("fit")))


class Waiting:
    """A clock that makes the run while its follower pauses for the first time."""

    def __init__(self, client: RunsClient) -> None:
        self._client = client

    def monotonic_s(self) -> float:
        return 0.0

    def unix_s(self) -> float:
        return 0.0

    def block(self, duration_s: float) -> None:
        self._client.create_run("fit", {"weight": np.ones(3, np.float32)})


def test_a_run_is_waited_for_and_another_replica_goes_on_with_it(tmp_path: Path) -> None:
    store_url = f"file://{tmp_path}/store"
    with syncer(store_url=store_url) as second, RunsClient(second) as client, ExitStack() as leaving:
        first = leaving.enter_context(syncer(store_url=store_url))
        with Follower(f"{first},{second}", "fit", clock=Waiting(client)) as follower:
            versions = iter(follower)
            begun = next(versions)
            assert begun.arrays()["weight"].tolist() == [1, 1, 1]
            leaving.close()
            client.roll_back("fit", begun.position)
            assert next(versions).versions == {"fragment-00": 1}


def test_patience_ends(target: str) -> None:
    with Follower(target, "nowhere", patience_s=0.1) as follower, pytest.raises(SkerryError) as caught:
        next(iter(follower))
    assert caught.value.reason == "RUN_NOT_FOUND"


def test_a_state_dict_is_the_callers_own(target: str) -> None:
    with RunsClient(target) as client, Follower(target, "fit") as follower:
        client.create_run("fit", {"weight": np.ones((2, 3), np.float32)})
        version = next(iter(follower))
        version.state_dict()["weight"].zero_()
        assert version.state_dict()["weight"].tolist() == [[1, 1, 1], [1, 1, 1]]
        with pytest.raises(ValueError, match="read-only"):
            version.arrays()["weight"][:] = 0


@pytest.mark.parametrize("options", [{"every": 0}, {"every": 1.5}, {"run": "a b"}, {"patience_s": 0}, {"target": ""}])
def test_an_argument_that_can_not_be_right_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        Follower(**{"target": "127.0.0.1:1", "run": "fit", **options})  # type: ignore[arg-type]  # on purpose
