"""Learners of NumPy arrays against a real syncer over real sockets."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from skerry import (
    ArrayLearner,
    Learner,
    RefusedError,
    RunsClient,
    Tls,
    TryAgainError,
    attach,
)
from tests.support.heard_logs import heard_logs
from tests.support.quadratic import QUICK, Quadratic, train_until


def _attached(target: str, learner_id: str | None = "us", *, problem: Quadratic | None = None) -> ArrayLearner:
    arrays = (problem or Quadratic()).arrays
    return ArrayLearner(arrays, target=target, run="fit", learner_id=learner_id, create=True, policy=QUICK)


SENSELESS: dict[str, list[Any]] = {
    "target": ["", " ", "127.0.0.1", "127.0.0.1:99999", "http://127.0.0.1:1", "a b:1"],
    "run": ["", " ", "py thon", "us/x", "..", "x" * 65],
    "learner_id": ["", " ", "py thon", "us/x", "..", "x" * 65],
    "region": [" ", "a b", "a/b"],
    "policy": [{}, "mean"],
    "planned_token_count": [-1, 10**19, float("nan"), 1.5],
    "fragment_count": [0, -1, 1.5],
    "connect_timeout_s": [0, -1, float("nan"), float("inf"), 1e300],
    "tls": ["", "on", Tls("missing.pem"), Tls(cert="missing.pem")],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in SENSELESS.items() for value in values])
def test_an_argument_that_can_not_be_right_is_refused_before_anything_is_done(
    name: str, value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Linear(2, 2)
    threads = set(threading.enumerate())
    options: dict[str, Any] = {"target": "127.0.0.1:1", "run": "fit", "learner_id": "us", name: value}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    calls: list[Callable[[], object]] = [
        lambda: ArrayLearner(Quadratic().arrays, **options),
        lambda: Learner(model, **options),
        lambda: attach(model, optimizer, tokens_per_step=8, **options),
    ]
    for call in calls:
        with pytest.raises((ValueError, TypeError)) as caught:
            call()
        assert len(str(caught.value).splitlines()) == 1
    assert set(threading.enumerate()) <= threads
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_a_mixture_of_experts_with_44544_tensors_is_created_merged_and_joined(target: str) -> None:
    names = [f"model.experts.{number}.gate_proj.weight" for number in range(44_544)]
    arrays = {name: np.zeros(2, np.float32) for name in names}
    options: dict[str, Any] = {"target": target, "run": "moe", "create": True, "connect_timeout_s": 120.0}
    with ArrayLearner(arrays, **options, learner_id="a", policy=QUICK) as learner:
        for array in arrays.values():
            array[:] += 1
        learner.step(1)
        assert learner.leave(120, load_merged=True)
    assert learner.stats.deltas_merged > 0
    joined = {name: np.zeros(2, np.float32) for name in names}
    with ArrayLearner(joined, **options, learner_id="b"):
        pass
    for name in names:
        np.testing.assert_array_equal(joined[name], arrays[name])
    with RunsClient(target) as client:
        assert len(client.get_run("moe").run.tensors) == len(client.list_runs()[0].tensors) == 44_544


def test_float16_arrays_train_and_their_rounding_is_nobodys_work(target: str) -> None:
    problem = Quadratic()
    problem.arrays = {name: array.astype(np.float16) for name, array in problem.arrays.items()}
    with _attached(target, problem=problem) as learner:
        train_until([(problem, learner)], lambda: min(learner.stats.versions.values()) >= 4)
        assert learner.flush(30)
        # Nothing was trained since: what is left to send is what quantisation dropped, not what the casts rounded.
        versions = learner.stats.versions
        assert learner.flush(30)
        assert learner.stats.versions == versions
    assert problem.loss < Quadratic().loss


@pytest.mark.parametrize("others", [[], ["eu"]], ids=["alone", "two"])
def test_steps_behind_a_short_delta_are_flushed_though_nobody_trains_on(target: str, others: list[str]) -> None:
    problem = Quadratic()
    with ExitStack() as stack:
        learner = stack.enter_context(_attached(target, problem=problem))
        for name in others:
            stack.enter_context(_attached(target, name))
        for step_count in range(1, 5):
            learner.step(tokens=8, loss=problem.descend())
            assert learner.flush(10), learner.stats
            assert (learner.stats.step_count, learner.stats.unsent_step_count) == (step_count, 0)


def test_other_shapes_are_refused_by_name(target: str) -> None:
    with _attached(target):
        arrays = Quadratic().arrays | {"body.bias": np.zeros(33, np.float32)}
        with pytest.raises(RefusedError, match=r"body\.bias") as refusal:
            ArrayLearner(arrays, target=target, run="fit", learner_id="b")
    assert refusal.value.reason == "SHAPE_MISMATCH"


def test_that_nobody_answers_is_said_within_the_time_given() -> None:
    begin_s = time.monotonic()
    with pytest.raises(TryAgainError) as failure:
        ArrayLearner(Quadratic().arrays, target="127.0.0.1:1", run="fit", learner_id="a", connect_timeout_s=0.5)
    assert failure.value.reason == "UNREACHABLE"
    assert time.monotonic() - begin_s < 10


def _train_three_steps(target: str, ending: type[BaseException]) -> ArrayLearner:
    """Takes three steps in `with`, and leaves it by an exception."""
    learner = _attached(target)

    def train() -> None:
        with learner:
            for _ in range(3):
                learner.step(tokens=8)
            raise ending

    with pytest.raises(ending):
        train()
    return learner


@pytest.mark.parametrize("ending", [SystemExit, KeyboardInterrupt])
def test_a_process_that_is_told_to_end_sends_its_last_work(target: str, ending: type[BaseException]) -> None:
    learner = _train_three_steps(target, ending)
    assert learner.stats.unsent_step_count == 0
    assert learner.stats.deltas_acknowledged > 0


def test_steps_that_are_lost_are_counted(target: str) -> None:
    with heard_logs() as logs:
        learner = _train_three_steps(target, ZeroDivisionError)
    (warning,) = [line for line in logs if line["log_level"] == "warning"]
    assert warning["unsent_steps"] == learner.stats.unsent_step_count == 3


def test_a_state_has_the_id_and_the_counts_which_go_on_from_it(target: str) -> None:
    with _attached(target) as learner:
        for _ in range(3):
            learner.step(tokens=8)
        state = learner.state_dict()
    assert state == {"learner_id": "us", "step_count": 3, "token_count": 24}
    with heard_logs() as logs, _attached(target) as learner:
        learner.load_state_dict(state)
        learner.step(tokens=8)
        assert (learner.stats.step_count, learner.stats.token_count, learner.stats.unsent_step_count) == (4, 32, 1)
        with pytest.raises(ValueError, match="before its first step"):
            learner.count_from(7, 70)
        assert learner.leave(10)
    assert [line["event"] for line in logs if line["log_level"] == "warning"] == []
    with RunsClient(target) as client:
        (status,) = client.get_run("fit").learners
        assert status.report is not None
        assert (status.report.step_count, status.report.token_count) == (4, 32)


def test_a_learner_that_joins_is_as_far_as_the_merged_share_of_the_plan(target: str) -> None:
    options: dict[str, Any] = {"target": target, "run": "fit", "create": True, "policy": QUICK}
    with RunsClient(target) as client:
        with ArrayLearner(Quadratic().arrays, planned_token_count=1000, **options) as first:
            assert (first.progress, first.planned_token_count) == (0, 1000)
            begin = client.get_run("fit").run.position
            for _ in range(4):
                first.step(tokens=50)
            assert first.leave(30, load_merged=True)
        with _attached(target, "late") as late:
            assert late.progress == 0.2
            late.step(tokens=50)
            assert late.progress == 0.25
        client.roll_back("fit", begin)
        with _attached(target, "later") as later:
            assert later.progress == 0


def test_what_is_no_state_is_refused(target: str) -> None:
    with _attached(target) as learner:
        for broken in ({}, {"learner_id": "us", "step_count": None, "token_count": 1}):
            with pytest.raises(ValueError, match="not what state_dict"):
                learner.load_state_dict(broken)


def test_learners_of_one_folder_without_a_name_have_one_each_and_write_nothing(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with _attached(target, None), _attached(target, None), RunsClient(target) as client:
        learners = client.get_run("fit").learners
        assert len({learner.learner_id for learner in learners if learner.is_live}) == 2
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("arrays", "advice"),
    [
        ({"w": [1.0]}, r"copies made by np.array\(\)"),
        ({}, "no array to train"),
        (torch.nn.Linear(2, 2), r"a torch module is for Learner\. type=Linear"),
    ],
)
def test_what_is_no_array_is_refused_with_what_to_give(arrays: Any, advice: str) -> None:
    with pytest.raises((TypeError, ValueError), match=advice):
        ArrayLearner(arrays, target="127.0.0.1:1", run="fit", learner_id="us")
