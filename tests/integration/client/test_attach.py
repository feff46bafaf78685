"""A learner that follows an optimizer, and what leaving a run does."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from skerry import ArrayLearner, Learner, Policy, attach
from tests.support.heard_logs import heard_logs
from tests.support.syncer_thread import syncer

POLICY = Policy(inner_step_count=2, lease_term_s=1.0)


def _made(target: str, learner_id: str = "us", **options: Any) -> dict[str, Any]:
    return {"target": target, "run": "mine", "learner_id": learner_id, "create": True, "policy": POLICY} | options


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("fused", [False, True])
def test_accumulated_batches_schedulers_and_skipped_steps_need_no_line_of_their_own(
    target: str, *, fused: bool
) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = model(torch.ones(1, 4)).square().mean().item()

    with attach(model, optimizer, tokens_per_step=16, **_made(target)) as learner:
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
    assert model(torch.ones(1, 4)).square().mean().item() < before


def _compiled_step(model: nn.Module, optimizer: torch.optim.Optimizer, learner: Learner) -> Callable[[], object]:
    optimizer_step = torch.compile(optimizer.step, backend="eager")

    def step() -> None:
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer_step()
        optimizer.zero_grad()

    return step


def _compiled_learner_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, learner: Learner
) -> Callable[[], object]:
    @torch.compile(backend="eager")
    def step() -> None:
        _step(model, optimizer)
        learner.step(1)

    return step


COMPILED: dict[str, Callable[[nn.Module, torch.optim.Optimizer, Learner], Callable[[], object]]] = {
    "the optimizer's step": _compiled_step,
    "the whole step": lambda model, optimizer, _: torch.compile(lambda: _step(model, optimizer), backend="eager"),
    "the learner's step": _compiled_learner_step,
}


@pytest.mark.parametrize("what", COMPILED)
def test_a_step_may_be_compiled(target: str, what: str) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    counts = what != "the learner's step"
    made = attach(model, optimizer, tokens_per_step=1, **_made(target)) if counts else Learner(model, **_made(target))
    with made as learner:
        step = COMPILED[what](model, optimizer, learner)
        for _ in range(6):
            step()
    assert learner.failure is None
    assert learner.stats.step_count == 6
    assert learner.stats.deltas_acknowledged > 0


def test_a_step_that_a_graph_captures_is_refused(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replays of the graph call no hook."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    learner = attach(model, optimizer, tokens_per_step=1, **_made(target))
    with pytest.raises(RuntimeError, match=r"call its step\(\) after each replay"):
        optimizer.step()
    learner.close()


def test_an_optimizer_that_keeps_nan_is_named_and_training_goes_on_once_it_is_reset(target: str) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    with attach(model, optimizer, tokens_per_step=1, **_made(target)) as learner, heard_logs() as logs:
        (model(torch.randn(8, 4)).square().mean() * float("nan")).backward()
        optimizer.step()
        optimizer.zero_grad()
        # While the weights are not finite the next step would bring NaN back into the state.
        while "optimizer.state.clear()" not in str(learner.stats.problem) or not model.weight.isfinite().all():
            _step(model, optimizer)
        optimizer.state.clear()
        while not learner.stats.deltas_merged:
            _step(model, optimizer)
    assert learner.stats.problem is None
    assert learner.failure is None
    (told,) = [line for line in logs if line.get("cause") == "not finite"]
    assert "optimizer.state.clear()" in told["because"]
    assert learner.stats.causes == {"not finite": learner.stats.deltas_dropped}


def test_an_optimizer_is_found_inside_its_wrappers(target: str) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped: Any = SimpleNamespace(optimizer=SimpleNamespace(optimizer=optimizer))
    with attach(model, wrapped, tokens_per_step=1, **_made(target)) as learner:
        _step(model, optimizer)
    assert learner.stats.step_count == 1


def test_an_optimizer_of_another_model_is_refused_before_anything_is_sent() -> None:
    optimizer = torch.optim.SGD(nn.Linear(4, 4).parameters(), lr=0.1)
    with pytest.raises(ValueError, match="trains none of the model's parameters"):
        attach(nn.Linear(4, 4), optimizer, tokens_per_step=1, target="127.0.0.1:9", run="mine")


def test_after_leaving_the_optimizer_is_free_for_another_learner(target: str) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = attach(model, optimizer, tokens_per_step=1, **_made(target))
    _step(model, optimizer)
    work = first.leave()
    assert work
    assert first.leave() == work
    with attach(model, optimizer, tokens_per_step=1, **_made(target)) as second:
        _step(model, optimizer)
    assert (first.stats.step_count, second.stats.step_count) == (1, 1)


@pytest.mark.parametrize(("learner_id", "loads"), [("us", False), ("eu", False), ("us", True)])
def test_attaching_again_has_the_models_earlier_learner_leave(target: str, learner_id: str, *, loads: bool) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = attach(model, optimizer, tokens_per_step=1, **_made(target))
    _step(model, optimizer)
    if loads:
        model.load_state_dict(nn.Linear(4, 4).state_dict())
    with attach(model, optimizer, tokens_per_step=1, **_made(target, learner_id)) as second:
        assert first.stats.unsent_step_count == int(loads), "steps of weights that are gone are not sent"
        _step(model, optimizer)
    assert (first.stats.step_count, second.stats.step_count) == (1, 1)
    assert (second.failure, second.stats.unsent_step_count) == (None, 0)


def test_loaded_weights_may_be_taken_back_by_copying(target: str) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(model, optimizer, tokens_per_step=1, **_made(target)) as learner:
        for _ in range(3):
            own = [parameter.detach().clone() for parameter in model.parameters()]
            model.load_state_dict(nn.Linear(4, 4).state_dict())
            with torch.no_grad():
                torch._foreach_copy_([*model.parameters()], own)
            _step(model, optimizer)
    assert (learner.failure, learner.stats.unsent_step_count) == (None, 0)


def test_leaving_can_end_with_the_runs_weights_bit_for_bit(target: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    learner = attach(model, optimizer, tokens_per_step=1, **_made(target))
    for _ in range(5):
        _step(model, optimizer)
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
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with syncer() as target:
        learner = attach(model, optimizer, tokens_per_step=1, **_made(target))
    _step(model, optimizer)
    own = model.weight.detach().clone()
    assert not learner.leave(0.2, load_merged=True)
    assert torch.equal(own, model.weight)
    assert not np.array_equal(learner.merged_weights()["weight"], own.numpy())


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


@pytest.mark.parametrize("ending", ["leave", "forget"])
def test_a_process_that_forgets_to_leave_is_told_what_it_lost(target: str, ending: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORGETFUL, target, ending], capture_output=True, text=True, check=True, timeout=120
    )
    is_told = "the process ends with steps" in done.stderr and "steps=1" in done.stderr
    assert is_told == (ending == "forget"), done.stdout + done.stderr
