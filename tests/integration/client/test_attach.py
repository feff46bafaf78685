"""A learner that follows an optimizer, and what leaving a run does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from skerry import ArrayLearner, Learner, Policy, attach
from tests.support.heard_logs import heard_logs
from tests.support.syncer_thread import syncer

POLICY = Policy(inner_step_count=2, lease_term_s=1.0)


class Trainee:
    """A small model whose optimizer a learner follows."""

    def __init__(self, target: str, optimizer: type[Any] = torch.optim.SGD, **options: Any) -> None:
        torch.manual_seed(0)
        self.target = target
        self.model = nn.Linear(4, 4)
        self.optimizer = optimizer(self.model.parameters(), lr=0.1, **options)
        self.learner = self.attach("us")

    def attach(self, learner_id: str) -> Learner:
        """Has a learner follow the optimizer, a first one or another one."""
        run: dict[str, Any] = {"target": self.target, "run": "mine", "create": True, "policy": POLICY}
        return attach(self.model, self.optimizer, tokens_per_step=16, learner_id=learner_id, **run)

    def step(self, factor: float = 1.0) -> None:
        """Trains a step, on a loss that is multiplied."""
        (self.model(torch.randn(8, 4)).square().mean() * factor).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


@pytest.mark.parametrize("fused", [False, True])
def test_accumulated_batches_schedulers_and_skipped_steps_need_no_line_of_their_own(
    target: str, *, fused: bool
) -> None:
    trainee = Trainee(target, fused=fused)
    model, optimizer, learner = trainee.model, trainee.optimizer, trainee.learner
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with learner:
        for number in range(10):
            for _ in range(2):
                loss = model(torch.randn(8, 4)).square().mean() * (float("inf") if number == 3 else 1.0)
                scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            optimizer.zero_grad()
    assert (learner.stats.step_count, learner.stats.token_count) == (9, 9 * 16)
    assert learner.stats.deltas_acknowledged > 0
    assert learner.stats.unsent_step_count == 0


@pytest.mark.parametrize("compiles_learner", [False, True])
def test_a_step_may_be_compiled(target: str, *, compiles_learner: bool) -> None:
    trainee = Trainee(target)
    learner = trainee.learner
    if compiles_learner:
        learner.leave()
        learner = Learner(trainee.model, target=target, run="mine", learner_id="eu")

    @torch.compile(backend="eager")
    def step() -> None:
        trainee.step()
        if compiles_learner:
            learner.step(1)

    with learner:
        for _ in range(6):
            step()
    assert learner.failure is None
    assert learner.stats.step_count == 6
    assert learner.stats.deltas_acknowledged > 0


def test_a_step_that_a_graph_captures_is_refused(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replays of the graph call no hook."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    trainee = Trainee(target)
    with pytest.raises(RuntimeError, match=r"call its step\(\) after each replay"):
        trainee.step()
    trainee.learner.close()


def test_an_optimizer_that_keeps_nan_is_named_and_training_goes_on_once_it_is_reset(target: str) -> None:
    trainee = Trainee(target, torch.optim.AdamW)
    learner = trainee.learner
    with learner, heard_logs() as logs:
        trainee.step(float("nan"))
        # While the weights are not finite the next step would bring NaN back into the state.
        while "optimizer.state.clear()" not in str(learner.stats.problem) or not trainee.model.weight.isfinite().all():
            trainee.step()
        trainee.optimizer.state.clear()
        while not learner.stats.deltas_merged:
            trainee.step()
    assert learner.stats.problem is None
    assert learner.failure is None
    (told,) = [line for line in logs if line.get("cause") == "not finite"]
    assert "optimizer.state.clear()" in told["because"]
    assert learner.stats.causes == {"not finite": learner.stats.deltas_dropped}


def test_an_optimizer_of_another_model_is_refused_before_anything_is_sent() -> None:
    optimizer = torch.optim.SGD(nn.Linear(4, 4).parameters(), lr=0.1)
    with pytest.raises(ValueError, match="trains none of the model's parameters"):
        attach(nn.Linear(4, 4), optimizer, tokens_per_step=1, target="127.0.0.1:9", run="mine")


@pytest.mark.parametrize(("learner_id", "loads"), [("us", False), ("eu", False), ("us", True)])
def test_attaching_again_has_the_models_earlier_learner_leave(target: str, learner_id: str, *, loads: bool) -> None:
    trainee = Trainee(target)
    first = trainee.learner
    trainee.step()
    if loads:
        trainee.model.load_state_dict(nn.Linear(4, 4).state_dict())
    with trainee.attach(learner_id) as second:
        assert first.stats.unsent_step_count == int(loads), "steps of weights that are gone are not sent"
        trainee.step()
    assert (first.stats.step_count, second.stats.step_count) == (1, 1)
    assert (second.failure, second.stats.unsent_step_count) == (None, 0)


def test_leaving_can_end_with_the_runs_weights_bit_for_bit(target: str) -> None:
    trainee = Trainee(target)
    model, learner = trainee.model, trainee.learner
    for _ in range(5):
        trainee.step()
    own = model.weight.detach().clone()
    assert learner.leave(60.0, load_merged=True)
    assert learner.stats.deltas_merged == learner.stats.deltas_acknowledged > 0
    assert not torch.equal(own, model.weight)  # 4 bits have rounded it, and the outer step has moved it

    merged = learner.merged_weights()
    arrays = {name: np.zeros_like(values) for name, values in merged.items()}
    with ArrayLearner(arrays, target=target, run="mine", learner_id="eu"):
        pass
    for name, tensor in model.state_dict().items():
        assert np.array_equal(tensor.numpy(), arrays[name])
        assert np.array_equal(merged[name], arrays[name])


def test_work_that_was_not_merged_stays_in_the_model() -> None:
    with syncer() as target:
        trainee = Trainee(target)
    trainee.step()
    own = trainee.model.weight.detach().clone()
    work = trainee.learner.leave(0.2, load_merged=True)
    assert not work
    assert work.unsent_step_count == 1
    assert work.because
    assert torch.equal(own, trainee.model.weight)
    assert not np.array_equal(trainee.learner.merged_weights()["weight"], own.numpy())


def test_attaching_says_in_one_line_what_was_created_or_joined_and_who_is_there(
    target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arrays = {"weight": np.zeros((4, 4), np.float32)}
    with (
        ArrayLearner(arrays, target=target, run="gpt", learner_id="us", create=True),
        ArrayLearner(arrays, target=target, run="gpt", learner_id="eu", create=True),
    ):
        assert capsys.readouterr().err.splitlines() == [
            "skerry: created the run run=gpt learner=us version=0 others=0",
            "skerry: joined the run run=gpt learner=eu version=0 others=1",
        ]


@pytest.mark.long
def test_a_start_that_compiles_kernels_says_why_it_is_quiet(target: str, tmp_path: Path) -> None:
    script = """
import sys, numpy as np
from skerry import ArrayLearner
ArrayLearner({"w": np.zeros(2**16, np.float32)}, target=sys.argv[1], run="fit", learner_id="us", create=True).close()
"""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", script, target]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stderr.count("loading kernels") == 1


FORGETFUL = """
import sys, torch
from skerry import attach
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
learner = attach(model, optimizer, tokens_per_step=1, target=sys.argv[1], run="mine", learner_id="us", create=True)
optimizer.step()
if sys.argv[2] == "leave":
    learner.leave()
"""


@pytest.mark.parametrize("ending", [pytest.param("leave", marks=pytest.mark.long), "forget"])
def test_a_process_that_forgets_to_leave_is_told_what_it_lost(target: str, ending: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORGETFUL, target, ending], capture_output=True, text=True, check=True, timeout=120
    )
    is_told = "the process ends with steps" in done.stderr and "steps=1" in done.stderr
    assert is_told == (ending == "forget"), done.stdout + done.stderr
