"""The training loop without a network: it learns, resumes bit for bit, emulates slower hardware and writes metrics."""

from __future__ import annotations

import argparse
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from skerry import Learner, Stats
from skerry_learner.errors import LearnerInputError
from skerry_learner.settings import LearnSettings
from skerry_learner.training import Trainer


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
    is_closed: bool = False
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
    directory.mkdir(exist_ok=True)
    return LearnSettings(
        learner_id="a",
        work_directory=directory,
        size="nano",
        context=32,
        source=Path(argparse.__file__),
        shard=(1, 2),
        batch_size=4,
        held_out_window_count=8,
        peak_rate=1e-2,
        warmup_steps=2,
        horizon_steps=60,
        step_count=steps,
        evaluate_every=10,
        checkpoint_every=4,
        log_every=0,
        slowdown=slowdown,
        device="cpu",
    )


def _lines(settings: LearnSettings) -> list[dict[str, Any]]:
    return [json.loads(line) for line in settings.metrics_path.read_text().splitlines()]


def _trainer(settings: LearnSettings) -> Trainer:
    return Trainer(settings, clock=ManualClock())


def _train(settings: LearnSettings, learner: ScriptedLearner | None = None) -> list[dict[str, Any]]:
    """Trains to the end and returns the lines of the metrics file."""
    _trainer(settings).train(cast("Learner | None", learner), stop=threading.Event())
    return _lines(settings)


def test_a_resumed_learner_goes_on_bit_for_bit(tmp_path: Path) -> None:
    whole = _train(_settings(tmp_path / "whole"))
    _train(_settings(tmp_path / "cut", steps=5))
    cut = _train(replace(_settings(tmp_path / "cut"), learner_id="b"))  # as one that was given none has another
    assert {line["step"]: line["loss"] for line in cut} == {line["step"]: line["loss"] for line in whole}
    assert {line["attempt"] for line in cut} == {0, 1}
    weights = [_trainer(_settings(tmp_path / name)).model.state_dict() for name in ("whole", "cut")]
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())
    assert {path.name for path in (tmp_path / "cut").iterdir()} == {"checkpoint.pt", "metrics.jsonl"}


def test_a_checkpoint_is_written_as_often_as_it_is_asked_for(tmp_path: Path) -> None:
    settings, saved = _settings(tmp_path), set[int]()
    _train(settings, ScriptedLearner(on_step=lambda: saved.add(_trainer(settings).position.step)))
    assert saved == {0, 4, 8}


def test_the_slowdown_is_a_multiple_of_the_time_that_the_step_took(tmp_path: Path) -> None:
    clock, settings = ManualClock(), _settings(tmp_path, slowdown=3.0)
    Trainer(settings, clock=clock).train(None, stop=threading.Event())
    lines = _lines(settings)[:-1]
    assert clock.slept_s == pytest.approx([2 * line["step_time_ms"] / 1e3 for line in lines])


def test_the_learner_hears_of_every_step_and_is_flushed_at_the_end(tmp_path: Path) -> None:
    learner = ScriptedLearner()
    lines = _train(_settings(tmp_path), learner)
    assert [tokens for tokens, _ in learner.steps] == [4 * 32] * 12
    assert [loss for _, loss in learner.steps] == [line["loss"] for line in lines[:12]]
    assert learner.flushes == [30.0]
    assert lines[-1]["deltas_acknowledged"] == 13
    assert lines[-1]["versions"] == {"body": 13}


def test_training_ends_when_the_run_is_closed(tmp_path: Path) -> None:
    learner = ScriptedLearner()
    learner.on_step = lambda: setattr(learner, "is_closed", len(learner.steps) >= 3)
    lines = _train(_settings(tmp_path), learner)
    assert lines[-1]["step"] == 3


def test_last_work_that_the_syncer_did_not_take_is_a_failure_with_everything_saved(tmp_path: Path) -> None:
    learner = ScriptedLearner(is_flushed=False)
    with pytest.raises(LearnerInputError, match=r"did not take the last work within 30 s\. steps=3"):
        _train(_settings(tmp_path, steps=3), learner)
    assert (tmp_path / "checkpoint.pt").exists()
    assert _lines(_settings(tmp_path))[-1]["step"] == 3


def test_a_stop_finishes_the_step_and_leaves_a_checkpoint(tmp_path: Path) -> None:
    stop = threading.Event()
    settings = _settings(tmp_path)
    learner = cast("Learner", ScriptedLearner(on_step=stop.set))
    position = _trainer(settings).train(learner, stop=stop)
    assert position.step == 1
    assert _trainer(settings).position == position


def test_the_learning_rate_follows_the_run_where_the_run_is_ahead(tmp_path: Path) -> None:
    behind = _train(_settings(tmp_path / "behind"), ScriptedLearner(progress=0.85))
    ahead = _train(_settings(tmp_path / "ahead"), ScriptedLearner(progress=0.0))
    assert len({line["learning_rate"] for line in behind}) == 1
    assert behind[0]["learning_rate"] < 0.25e-2
    assert ahead[11]["learning_rate"] > 0.9e-2


@pytest.mark.parametrize("content", [b"garbage", b"PK\x03\x04 cut off", None])
def test_a_checkpoint_that_can_not_be_resumed_says_what_would_help(tmp_path: Path, content: bytes | None) -> None:
    settings = _settings(tmp_path, steps=1)
    _train(settings)
    if content is not None:
        settings.checkpoint_path.write_bytes(content)
    muon, wider = replace(settings, optimizer="muon"), replace(settings, size="tiny")
    for other in (muon, wider) if content is None else (settings,):
        with pytest.raises(LearnerInputError, match="Remove it, or use another --work-dir"):
            _trainer(other)
