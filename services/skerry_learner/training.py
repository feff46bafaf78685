"""The training loop: inner steps, and after each one a call of the client's `Learner`, which never waits."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import torch

from skerry import Learner, SkerryError
from skerry.runtime.clock import ThreadClock
from skerry.runtime.logs import get_logger
from skerry_learner.batches import Batch, BatchSampler, held_out_batches
from skerry_learner.checkpoint import TrainingPosition, load_checkpoint, save_checkpoint
from skerry_learner.corpus import Corpus, load_corpus
from skerry_learner.errors import LearnerInputError
from skerry_learner.inner_training import evaluate, inner_step, make_optimizer
from skerry_learner.metrics import MetricsFile
from skerry_learner.model import Gpt
from skerry_learner.schedule import learning_rate, run_position
from skerry_learner.settings import LearnSettings, ModelConfig

_log = get_logger(__name__)


def choose_device(name: str) -> torch.device:
    """Returns the torch device `name`; `auto` is the first CUDA device, or the CPU if there is none.

    Raises:
        LearnerInputError: there is no such device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        because = str(error).splitlines()[0]
        raise LearnerInputError(
            f"no such device. device={name}, because={because}. Pass another --device, or auto"
        ) from error
    return device


def load_data(settings: LearnSettings, config: ModelConfig) -> tuple[Corpus, list[Batch], torch.device]:
    """Returns the data, the held-out batches of a model of this shape on their device, and the device.

    Raises:
        LearnerInputError: the data can't be read or is too short, or there is no such device.
    """
    corpus = load_corpus(settings.source, shard=settings.shard or (1, 1))
    window_count = settings.held_out_window_count
    batches = held_out_batches(corpus.held_out, config, batch_size=settings.batch_size, window_count=window_count)
    device = choose_device(settings.device)
    return corpus, [batch.to(device) for batch in batches], device


class Trainer:
    """A learner's model, data and optimizer, resumed from its local checkpoint where there is one, and its loop.

    Raises:
        LearnerInputError: the data can't be read or is too short, or the checkpoint can't be resumed.
    """

    def __init__(self, settings: LearnSettings, *, clock: ThreadClock) -> None:
        self.settings = settings
        config = settings.model
        corpus, self._held_out, self._device = load_data(settings, config)
        torch.manual_seed(settings.seed)
        self.model = Gpt(config).to(self._device)
        self._optimizer = make_optimizer(self.model, settings.optimizer, weight_decay=settings.weight_decay)
        position = load_checkpoint(settings.checkpoint_path, model=self.model, optimizer=self._optimizer)
        self.position = replace(position, learner=position.learner or settings.learner_id)
        self._sampler = BatchSampler(
            corpus.train, config, batch_size=settings.batch_size, seed=settings.seed, learner=self.position.learner
        )
        self._clock = clock
        self._last_line: dict[str, Any] = {}  # of the metrics
        self._has_lost_lines = False
        _log.info(
            "learner ready",
            learner=settings.learner_id,
            data=corpus.description,
            train_tokens=len(corpus.train),
            held_out_tokens=len(corpus.held_out),
            parameters=self.model.parameter_count,
            device=str(self._device),
            resumed_step=self.position.step,
        )

    def train(self, learner: Learner | None, *, stop: threading.Event) -> TrainingPosition:
        """Trains until the steps are done, the run is closed or `stop` is set, and returns the position reached.

        Without a `learner` this is plain training, a baseline to compare with. `stop` is checked between steps. At the
        end a checkpoint is written and the learner is flushed. A full disk does not stop training. To be called once.

        Raises:
            LearnerInputError: the last checkpoint could not be written, or the last work was not acknowledged.
        """
        self._started_s = self._clock.monotonic_s() - self.position.time_s
        with MetricsFile(self.settings.metrics_path) as metrics:
            try:
                self._run(learner, metrics, stop)
            finally:
                is_saved = self._save()  # also after a failed step: the work until then is worth keeping
            self._end(learner, metrics)
        if not is_saved:
            raise LearnerInputError(
                "trained to the end, but the checkpoint can't be written. "
                f"path={self.settings.checkpoint_path}. Free space, or pass another --work-dir"
            )
        return self.position

    def _run(self, learner: Learner | None, metrics: MetricsFile, stop: threading.Event) -> None:
        while self.position.step < self.settings.step_count:
            if stop.is_set():
                _log.info("stopping on request", step=self.position.step)
                return
            if learner is not None and learner.is_closed:
                _log.info("the run is closed", step=self.position.step)
                return
            self._step(learner, metrics)
            if self._is_due(self.settings.checkpoint_every):
                self._save()

    def _save(self) -> bool:
        """Writes the checkpoint and returns whether that succeeded; training goes on without it."""
        path = self.settings.checkpoint_path
        try:
            save_checkpoint(path, model=self.model, optimizer=self._optimizer, position=self.position)
        except (OSError, RuntimeError) as error:
            _log.warning("checkpoint can't be written, training goes on", path=str(path), because=str(error))
            return False
        return True

    def _end(self, learner: Learner | None, metrics: MetricsFile) -> None:
        """Flushes the learner, and writes the last metrics line again, so that the file ends with the final counts.

        Raises:
            LearnerInputError: the last work was not acknowledged.
        """
        timeout_s = self.settings.flush_timeout_s
        is_flushed = learner is None or learner.flush(timeout_s, is_last=True)
        if self._last_line:
            self._write(metrics, learner)
        if learner is not None and not is_flushed:
            raise LearnerInputError(
                f"trained to the end, but the syncer did not take the last work within {timeout_s:g} s. "
                f"steps={learner.stats.unsent_step_count}. See whether it runs and has space, or raise "
                "--flush-timeout"
            )

    def _step(self, learner: Learner | None, metrics: MetricsFile) -> None:
        settings, clock = self.settings, self._clock
        batch = self._sampler.batch(self.position.step)
        rate = self._learning_rate(learner)
        begun_s = clock.monotonic_s()
        loss, norm = inner_step(self.model, self._optimizer, batch.to(self._device), rate=rate)
        if not torch.isfinite(norm):
            _log.warning("gradient is not finite, step skipped", step=self.position.step, norm=float(norm))
        loss_value = float(loss)
        compute_s = clock.monotonic_s() - begun_s
        slowdown_s = (settings.slowdown - 1.0) * compute_s
        clock.block(slowdown_s)
        self.position = replace(
            self.position,
            step=self.position.step + 1,
            tokens=self.position.tokens + batch.token_count,
            time_s=clock.monotonic_s() - self._started_s,
        )
        begun_s = clock.monotonic_s()
        if learner is not None:
            learner.step(batch.token_count, loss_value)
        stall_s = clock.monotonic_s() - begun_s
        is_last = self.position.step == settings.step_count
        is_evaluated = self._is_due(settings.evaluate_every) or (is_last and settings.evaluate_every)
        self._last_line = {
            "learner": settings.learner_id,
            "attempt": metrics.attempt,
            "time_s": self.position.time_s,
            "step": self.position.step,
            "tokens": self.position.tokens,
            "loss": loss_value,
            "val_loss": evaluate(self.model, self._held_out) if is_evaluated else None,
            "learning_rate": rate,
            "step_time_ms": compute_s * 1e3,
            "slowdown_ms": slowdown_s * 1e3,
            "sync_stall_ms": stall_s * 1e3,
        }
        self._write(metrics, learner)
        if self._is_due(settings.log_every) or (is_last and settings.log_every):
            shown = ("learner", "step", "loss", "val_loss", "step_time_ms", "sync_stall_ms")
            _log.info("step", **{name: _rounded(self._last_line[name]) for name in shown})

    def _learning_rate(self, learner: Learner | None) -> float:
        settings, horizon = self.settings, self.settings.horizon
        progress = None if learner is None else learner.progress
        position = run_position(self.position.step, progress, horizon_steps=horizon)
        return learning_rate(
            position, peak=settings.peak_rate, warmup_steps=settings.warmup_steps, horizon_steps=horizon
        )

    def _is_due(self, every: int) -> bool:
        return bool(every) and self.position.step % every == 0

    def _write(self, metrics: MetricsFile, learner: Learner | None) -> None:
        """Writes the last metrics line with what the learner has exchanged until now."""
        stats = {} if learner is None else vars(learner.stats)
        exchanged = {name: value for name, value in stats.items() if not isinstance(value, SkerryError)}
        line = exchanged | self._last_line | {"unix_s": self._clock.unix_s()}
        try:
            metrics.write(line)
        except OSError as error:
            if not self._has_lost_lines:
                _log.warning("metrics can't be written, training goes on", step=line["step"], because=str(error))
            self._has_lost_lines = True


def _rounded(value: Any) -> Any:
    return round(value, 4) if isinstance(value, float) else value
