"""The training loop without a network: it learns, resumes bit for bit, emulates slower hardware and writes metrics."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

from skerry import SkerryError, Stats
from skerry.runtime.clock import SystemClock
from skerry_learner.checkpoint import TrainingPosition
from skerry_learner.corpus import ShardSelection
from skerry_learner.errors import LearnerInputError
from skerry_learner.metrics import MetricsLine, read_metrics
from skerry_learner.model import MODEL_CONFIGS
from skerry_learner.settings import LearnSettings, OptimizerSettings
from skerry_learner.training import AttachedLearner, Training, prepare, train
from tests.support.heard_logs import heard_logs


class ManualClock:
    """Time that passes only where somebody sleeps or reads the monotonic clock, 10 ms a reading."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.slept_s: list[float] = []

    def monotonic_s(self) -> float:
        self.now_s += 0.01
        return self.now_s

    def unix_s(self) -> float:
        return 1_000_000 + self.now_s

    def block(self, duration_s: float) -> None:
        self.now_s += duration_s
        self.slept_s.append(duration_s)


@dataclass
class ScriptedLearner:
    """A learner of the client whose run says what a test wants it to say."""

    progress: float | None = None
    planned_step_count: int = 0
    is_closed: bool = False
    failure: SkerryError | None = None
    is_flushed: bool = True
    on_step: Callable[[], None] = lambda: None
    steps: list[tuple[int, float | None]] = field(default_factory=list)
    flushes: list[float] = field(default_factory=list)

    def step(self, tokens: int, loss: float | None = None) -> None:
        self.steps.append((tokens, loss))
        self.on_step()

    @property
    def stats(self) -> Stats:
        # Acknowledged one a step, and one more by the flush.
        count = len(self.steps) + len(self.flushes)
        unsent = 0 if self.is_flushed else len(self.steps)
        return Stats(is_attached=True, deltas_acknowledged=count, versions={"body": count}, unsent_step_count=unsent)

    def flush(self, timeout_s: float, *, is_last: bool = False) -> bool:
        self.flushes.append(timeout_s)
        return self.is_flushed


def _settings(directory: Path, *, steps: int = 12, slowdown: float = 1.0) -> LearnSettings:
    return LearnSettings(
        learner_id="a",
        work_directory=directory,
        model=replace(MODEL_CONFIGS["nano"], context=32),
        size_limit_bytes=400_000,
        shard=ShardSelection(1, 2),
        batch_size=4,
        held_out_window_count=8,
        optimizer=OptimizerSettings(peak_rate=1e-2, warmup_steps=2, horizon_steps=60),
        step_count=steps,
        evaluate_every=10,
        checkpoint_every=4,
        log_every=0,
        slowdown=slowdown,
        device="cpu",
    )


def _train(settings: LearnSettings, learner: AttachedLearner | None = None) -> tuple[Training, list[MetricsLine]]:
    training = prepare(settings)
    train(training, learner, clock=ManualClock(), stop=threading.Event())
    return training, list(read_metrics(settings.metrics_path))


def test_the_loss_falls(tmp_path: Path) -> None:
    _, lines = _train(_settings(tmp_path, steps=60))
    assert lines[0].loss == pytest.approx(5.55, abs=0.1)
    evaluated = [line.val_loss for line in lines if line.val_loss is not None]
    assert evaluated[-1] < 4.0


def test_a_resumed_learner_goes_on_bit_for_bit(tmp_path: Path) -> None:
    whole, whole_lines = _train(_settings(tmp_path / "whole"))
    _train(_settings(tmp_path / "cut", steps=5))
    resumed, cut_lines = _train(_settings(tmp_path / "cut"))
    assert {line.step: line.loss for line in cut_lines} == {line.step: line.loss for line in whole_lines}
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, resumed.model.state_dict()[name]), name
    assert {line.attempt for line in cut_lines} == {0, 1}


def test_a_learner_that_was_killed_resumes_from_its_last_checkpoint(tmp_path: Path) -> None:
    class Killed(BaseException):
        """Ends the process here, as far as the loop can tell."""

    def kill_at_step_7() -> None:
        if len(learner.steps) == 7:
            # What SIGKILL leaves is the checkpoint of step 4, so the one that the loop writes on its way out goes.
            kept.append((tmp_path / "checkpoint.pt").read_bytes())
            raise Killed

    kept: list[bytes] = []
    learner = ScriptedLearner(on_step=kill_at_step_7)
    with pytest.raises(Killed):
        _train(_settings(tmp_path), learner)
    (tmp_path / "checkpoint.pt").write_bytes(kept[0])
    training = prepare(_settings(tmp_path))
    assert training.position.step == 4
    assert training.attempt == 1


def test_the_slowdown_is_a_multiple_of_the_time_that_the_step_took(tmp_path: Path) -> None:
    training = prepare(_settings(tmp_path, slowdown=3.0))
    clock = ManualClock()
    train(training, None, clock=clock, stop=threading.Event())
    lines = list(read_metrics(training.settings.metrics_path))[:-1]
    assert clock.slept_s == pytest.approx([2 * line.step_time_ms / 1e3 for line in lines])


def test_the_learner_hears_of_every_step_and_is_flushed_at_the_end(tmp_path: Path) -> None:
    learner = ScriptedLearner()
    _, lines = _train(_settings(tmp_path), learner)
    assert [tokens for tokens, _ in learner.steps] == [4 * 32] * 12
    assert [loss for _, loss in learner.steps] == [line.loss for line in lines[:12]]
    assert learner.flushes == [30.0]
    assert lines[-1].deltas_acknowledged == 13
    assert lines[-1].versions == {"body": 13}


def test_training_ends_when_the_run_is_closed(tmp_path: Path) -> None:
    learner = ScriptedLearner()

    def close_after_three() -> None:
        learner.is_closed = len(learner.steps) >= 3

    learner.on_step = close_after_three
    _, lines = _train(_settings(tmp_path), learner)
    assert lines[-1].step == 3


def test_a_learner_that_left_the_run_early_says_so_at_the_end(tmp_path: Path) -> None:
    learner = ScriptedLearner(failure=SkerryError("SESSION_FENCED", "a newer process took this learner's place"))
    with heard_logs() as logs:
        _train(_settings(tmp_path, steps=2), learner)
    assert [line["because"] for line in logs if line["log_level"] == "warning"] == [str(learner.failure)]


def test_last_work_that_the_syncer_did_not_take_is_a_failure_with_everything_saved(tmp_path: Path) -> None:
    learner = ScriptedLearner(is_flushed=False)
    with pytest.raises(LearnerInputError, match=r"did not take the last work within 30 s\. steps=3"):
        _train(_settings(tmp_path, steps=3), learner)
    assert (tmp_path / "checkpoint.pt").exists()
    assert [line.step for line in read_metrics(tmp_path / "metrics.jsonl")][-1] == 3


def test_a_stop_finishes_the_step_and_leaves_a_checkpoint(tmp_path: Path) -> None:
    stop = threading.Event()
    settings = _settings(tmp_path)
    position = train(prepare(settings), ScriptedLearner(on_step=stop.set), clock=SystemClock(), stop=stop)
    assert position.step == 1
    assert prepare(settings).position == position


def test_the_learning_rate_follows_the_run_where_the_run_is_ahead(tmp_path: Path) -> None:
    _, behind = _train(_settings(tmp_path / "behind"), ScriptedLearner(progress=50.0))
    _, ahead = _train(_settings(tmp_path / "ahead"), ScriptedLearner(progress=0.0))
    assert len({line.learning_rate for line in behind}) == 1
    assert behind[0].learning_rate < 0.25e-2
    assert ahead[11].learning_rate > 0.9e-2


def test_a_checkpoint_of_another_optimizer_says_what_would_help(tmp_path: Path) -> None:
    settings = _settings(tmp_path, steps=2)
    _train(settings)
    muon = replace(settings, optimizer=replace(settings.optimizer, name="muon"))
    with pytest.raises(LearnerInputError, match="--optimizer"):
        prepare(muon)


def test_a_checkpoint_of_another_model_says_what_would_help(tmp_path: Path) -> None:
    _train(_settings(tmp_path, steps=1))
    other = replace(_settings(tmp_path), model=replace(MODEL_CONFIGS["nano"], context=32, layer_count=1))
    with pytest.raises(LearnerInputError, match=r"(?s)belongs to another model.*use another --work-dir"):
        prepare(other)


@pytest.mark.parametrize("content", [b"", b"garbage", b"PK\x03\x04 cut off"])
def test_a_damaged_checkpoint_says_what_would_help(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "checkpoint.pt").write_bytes(content)
    with pytest.raises(LearnerInputError, match="remove it, or use another --work-dir"):
        prepare(_settings(tmp_path))


def test_a_checkpoint_write_leaves_nothing_else_behind(tmp_path: Path) -> None:
    _train(_settings(tmp_path, steps=5))
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint.pt", "metrics.jsonl"}


def test_a_step_whose_gradient_is_not_finite_changes_nothing(tmp_path: Path) -> None:
    training = prepare(_settings(tmp_path, steps=1))
    with torch.no_grad():
        training.model.norm.weight[0] = float("nan")
    before = {name: tensor.clone() for name, tensor in training.model.state_dict().items()}
    train(training, None, clock=ManualClock(), stop=threading.Event())
    for name, tensor in training.model.state_dict().items():
        torch.testing.assert_close(tensor, before[name], equal_nan=True, rtol=0, atol=0)


def test_a_fresh_learner_starts_at_step_zero(tmp_path: Path) -> None:
    assert prepare(_settings(tmp_path)).position == TrainingPosition()
