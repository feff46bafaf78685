"""Hugging Face's Trainer as a learner."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from skerry import Policy, SkerryError
from skerry.integrations.transformers import SkerryCallback
from tests.e2e.trainers.hugging_face import llama, trainer_of
from tests.e2e.trainers.two_islands import assert_merged, train_two_islands

POLICY = Policy(inner_step_count=2, lease_term_s=1.0)


def _train(folder: Path, *callbacks: TrainerCallback, resume: bool = False, **options: Any) -> Trainer:
    trainer = trainer_of(folder, *callbacks, **options)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def _callback(target: str, **options: Any) -> SkerryCallback:
    shared: dict[str, Any] = {"run": "hf", "learner_id": "us", "create": True, "policy": POLICY}
    return SkerryCallback(target=target, **(shared | options))


class _BeforeSteps(TrainerCallback):  # type: ignore[misc]  # untyped
    """Calls a function before each step, with the step's number."""

    def __init__(self, act: Callable[[int], object]) -> None:
        self._act = act

    def on_step_begin(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
        self._act(state.global_step)


class _Spy(TrainerCallback):  # type: ignore[misc]  # untyped
    """Keeps the learner's counts after each step, and what the trackers after Skerry's callback are given."""

    def __init__(self, skerry: SkerryCallback) -> None:
        self.skerry = skerry
        self.counts: list[tuple[int, int]] = []
        self.logs: list[dict[str, float]] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        if self.skerry.learner is not None:
            stats = self.skerry.learner.stats
            self.counts.append((stats.step_count, stats.token_count))

    def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
        self.logs.append(dict(logs))


def test_two_islands_one_is_killed_and_the_merged_model_loads(target: str, tmp_path: Path) -> None:
    out = train_two_islands("huggingface", target, "huggingface", tmp_path)
    loaded = LlamaForCausalLM.from_pretrained(out)
    assert_merged(target, "huggingface", dict(loaded.named_parameters()))
    row = torch.arange(1, 17)[None]
    assert loaded(input_ids=row, labels=row).loss.item() < 3.0  # untrained it is log 64 = 4.2


@pytest.mark.parametrize(("options", "token_count"), [({}, 3 * 2 * 8), ({"tokens_per_step": 5}, 5)])
def test_accumulated_batches_are_one_step_and_trackers_get_its_numbers(
    target: str, tmp_path: Path, options: dict[str, int], token_count: int
) -> None:
    skerry = _callback(target, **options)
    tracker = _Spy(skerry)  # before Skerry's callback, where the trainer has those of `report_to`
    trainer = _train(tmp_path, tracker, skerry, gradient_accumulation_steps=3)
    assert tracker.counts == [(step, step * token_count) for step in range(6)]
    assert skerry.learner is None
    # The trainer's log of the last step comes after the learner has left.
    assert all("skerry/version" in log for log in tracker.logs[:5])
    assert any("skerry/version" in entry for entry in trainer.state.log_history)


def test_a_model_whose_tokens_are_not_counted_is_refused(target: str, tmp_path: Path) -> None:
    model = llama()
    skerry = _callback(target)
    type(model).main_input_name, kept = "pixels", type(model).main_input_name
    try:
        with pytest.raises(ValueError, match="counts no tokens of this model"):
            _train(tmp_path, skerry, model=model)
    finally:
        type(model).main_input_name = kept
        skerry.leave()


def test_a_resumed_trainer_attaches_after_its_checkpoint_and_the_last_checkpoint_is_merged(
    target: str, tmp_path: Path
) -> None:
    _train(tmp_path, _callback(target), max_steps=4, save_steps=2)
    skerry = _callback(target)
    spy = _Spy(skerry)
    trainer = _train(tmp_path, skerry, spy, max_steps=8, save_steps=2, resume=True)
    assert trainer.state.global_step == 8
    assert spy.counts == [(step, step * 2 * 8) for step in range(4, 8)]
    assert_merged(target, "hf", dict(trainer.model.named_parameters()))
    saved = LlamaForCausalLM.from_pretrained(tmp_path / "checkpoint-8")
    assert_merged(target, "hf", dict(saved.named_parameters()))


_BY_EPOCH: dict[str, Any] = {
    "per_device_train_batch_size": 16, "eval_strategy": "epoch", "save_strategy": "epoch",
    "metric_for_best_model": "eval_loss",
}  # fmt: skip


@pytest.mark.parametrize(
    ("stops_after", "loads_best", "options"),
    [
        (3, True, {"eval_strategy": "steps", "eval_steps": 3, "save_steps": 3, "metric_for_best_model": "eval_loss"}),
        (8, True, _BY_EPOCH),
        (8, False, _BY_EPOCH),
    ],
)
def test_an_early_stop_loses_no_step(
    target: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    stops_after: int,
    options: dict[str, Any],
    *,
    loads_best: bool,
) -> None:
    kept: list[Any] = []

    class _Stopping(TrainerCallback):  # type: ignore[misc]  # untyped
        def on_evaluate(self, _: Any, state: Any, control: Any, **__: Any) -> None:
            kept.append(skerry.learner)
            control.should_training_stop = state.global_step == stops_after

    skerry = _callback(target, policy=None)
    trainer = _train(tmp_path, skerry, _Stopping(), max_steps=100, load_best_model_at_end=loads_best, **options)
    assert trainer.state.global_step == stops_after
    assert skerry.learner is None
    assert (kept[-1].stats.step_count, kept[-1].stats.unsent_step_count) == (stops_after, 0)
    assert "the last work is not in the run" not in caplog.text
    if loads_best:
        saved = LlamaForCausalLM.from_pretrained(trainer.state.best_model_checkpoint)
        assert all(map(torch.equal, trainer.model.parameters(), saved.parameters()))
    else:
        assert_merged(target, "hf", dict(trainer.model.named_parameters()))


def test_a_trainer_that_resumes_at_its_last_step_leaves(target: str, tmp_path: Path) -> None:
    epoch: dict[str, Any] = {"max_steps": -1, "num_train_epochs": 1, "per_device_train_batch_size": 16, "save_steps": 4}
    _train(tmp_path, _callback(target), **epoch)
    skerry = _callback(target)
    trainer = _train(tmp_path, skerry, resume=True, **epoch)
    assert trainer.state.global_step == 4
    assert skerry.learner is None
    assert_merged(target, "hf", dict(trainer.model.named_parameters()))


def test_deepspeed_is_refused_by_name(target: str, tmp_path: Path) -> None:
    arguments = TrainingArguments(str(tmp_path), use_cpu=True)
    arguments.deepspeed_plugin = object()
    with pytest.raises(ValueError, match="strategy=DeepSpeed"):
        _callback(target).on_train_begin(arguments, TrainerState(), TrainerControl(), model=llama())


def test_wrong_options_and_missing_runs_are_said_before_training(target: str, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="learner"):
        SkerryCallback(target=target, run="hf", learner="us")
    with pytest.raises(TypeError, match="run"):
        SkerryCallback(target=target)
    with pytest.raises(SkerryError):
        _train(tmp_path, SkerryCallback(target=target, run="absent"))


@pytest.mark.parametrize("is_handled", [True, False])
def test_an_error_loses_no_step(target: str, tmp_path: Path, *, is_handled: bool) -> None:
    def fail(step: int) -> None:
        if step == 3:
            raise OSError("the data are gone")

    before = sys.excepthook
    skerry = _callback(target, policy=None)
    with pytest.raises(OSError, match="the data") as failed:
        _train(tmp_path, skerry, _BeforeSteps(fail))
    learner = skerry.learner
    assert learner is not None
    assert learner.stats.unsent_step_count == 3
    if is_handled:
        skerry.leave()
        skerry.leave()
    else:
        sys.excepthook(failed.type, failed.value, failed.tb)  # as Python does at the end of the process
    assert learner.stats.unsent_step_count == 0
    assert sys.excepthook is before


def test_a_signal_ends_training_with_the_step_under_way_and_loses_nothing(target: str, tmp_path: Path) -> None:
    kept: list[Any] = []

    def signalled(step: int) -> None:
        if step == 3:
            kept.append(skerry.learner)
            signal.raise_signal(signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    skerry = _callback(target, policy=None, leave_on_signal=True)
    with pytest.raises(SystemExit) as ended:
        _train(tmp_path, skerry, _BeforeSteps(signalled), max_steps=10**6)
    assert ended.value.code == 128 + signal.SIGTERM
    assert (kept[0].stats.step_count, kept[0].stats.unsent_step_count) == (4, 0)
    signal.raise_signal(signal.SIGTERM)  # as a launcher passes it on, while the program ends
    signal.signal(signal.SIGTERM, before)
