"""The training loop: inner steps, and after each one a call of the client's `Learner`, which never waits."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any, Final

import torch

from skerry import Learner
from skerry.runtime.clock import ThreadClock
from skerry.runtime.logs import get_logger
from skerry_learner.batches import Batch, BatchSampler, held_out_batches
from skerry_learner.checkpoint import TrainingPosition, load_checkpoint, save_checkpoint
from skerry_learner.corpus import load_corpus
from skerry_learner.errors import LearnerInputError
from skerry_learner.inner_training import InnerOptimizer, evaluate, inner_step, make_optimizer
from skerry_learner.metrics import MetricsFile
from skerry_learner.model import Gpt
from skerry_learner.schedule import learning_rate, run_position
from skerry_learner.settings import LearnSettings

_log = get_logger(__name__)

# Fields that a metrics line takes from the client's Stats, under the same names.
_EXCHANGE_FIELDS: Final = (
    "is_attached", "staleness", "bytes_up", "bytes_down", "deltas_acknowledged", "deltas_merged",
    "deltas_returned", "deltas_dropped", "dropped_step_count",
)  # fmt: skip


@dataclass(frozen=True)
class Training:
    """What a learner trains with."""

    settings: LearnSettings
    device: torch.device
    model: Gpt
    optimizer: InnerOptimizer
    sampler: BatchSampler
    held_out: list[Batch]
    position: TrainingPosition


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


def prepare(settings: LearnSettings) -> Training:
    """Returns the model, its data and its optimizer, resumed from the local checkpoint where there is one.

    Raises:
        LearnerInputError: the data can't be read or is too short, or the checkpoint can't be resumed.
    """
    corpus = load_corpus(settings.source, shard=settings.shard, size_limit_bytes=settings.size_limit_bytes)
    sampler = BatchSampler(
        corpus.train, settings.model, batch_size=settings.batch_size, seed=settings.seed, learner=settings.learner_id
    )
    held_out = held_out_batches(
        corpus.held_out, settings.model, batch_size=settings.batch_size, window_count=settings.held_out_window_count
    )
    device = choose_device(settings.device)
    torch.manual_seed(settings.seed)
    model = Gpt(settings.model).to(device)
    optimizer = make_optimizer(model, settings.optimizer)
    position = load_checkpoint(settings.checkpoint_path, model=model, optimizer=optimizer)
    _log.info(
        "learner ready",
        learner=settings.learner_id,
        data=corpus.description,
        train_tokens=len(corpus.train),
        held_out_tokens=len(corpus.held_out),
        parameters=model.parameter_count,
        device=str(device),
        resumed_step=position.step,
    )
    return Training(settings, device, model, optimizer, sampler, [batch.to(device) for batch in held_out], position)


def train(
    training: Training, learner: Learner | None, *, clock: ThreadClock, stop: threading.Event
) -> TrainingPosition:
    """Trains until the steps are done, the run is closed or `stop` is set, and returns the position reached.

    Without a `learner` this is plain training, a baseline to compare with. `stop` is checked between steps. At the end
    a checkpoint is written and the learner is flushed. A full disk does not stop training.

    Raises:
        LearnerInputError: the last checkpoint could not be written, or the last work was not acknowledged.
    """
    with MetricsFile(training.settings.metrics_path) as metrics:
        loop = _Loop(training, learner, clock=clock, metrics=metrics)
        try:
            loop.run(stop)
        finally:
            is_saved = loop.save()  # also after a failed step: the work until then is worth keeping
        loop.end()
    if not is_saved:
        raise LearnerInputError(
            "trained to the end, but the checkpoint can't be written. "
            f"path={training.settings.checkpoint_path}. Free space, or pass another --work-dir"
        )
    return loop.position


class _Loop:
    """The loop's own state: the position, and the last metrics line that it wrote."""

    def __init__(
        self, training: Training, learner: Learner | None, *, clock: ThreadClock, metrics: MetricsFile
    ) -> None:
        self.position = training.position
        self._training = training
        self._settings = training.settings
        self._learner = learner
        self._clock = clock
        self._metrics = metrics
        self._last_line: dict[str, Any] = {}
        self._has_lost_lines = False
        self._started_s = clock.monotonic_s() - training.position.time_s

    def run(self, stop: threading.Event) -> None:
        while self.position.step < self._settings.step_count:
            if stop.is_set():
                _log.info("stopping on request", step=self.position.step)
                return
            if self._learner is not None and self._learner.is_closed:
                _log.info("the run is closed", step=self.position.step)
                return
            self._step()
            if self._is_due(self._settings.checkpoint_every):
                self.save()

    def save(self) -> bool:
        """Writes the checkpoint and returns whether that succeeded; training goes on without it."""
        training, path = self._training, self._settings.checkpoint_path
        try:
            save_checkpoint(path, model=training.model, optimizer=training.optimizer, position=self.position)
        except (OSError, RuntimeError) as error:
            _log.warning("checkpoint can't be written, training goes on", path=str(path), because=str(error))
            return False
        return True

    def end(self) -> None:
        """Flushes the learner, and writes the last metrics line again, so that the file ends with the final counts.

        Raises:
            LearnerInputError: the last work was not acknowledged.
        """
        learner, timeout_s = self._learner, self._settings.flush_timeout_s
        is_flushed = learner is None or learner.flush(timeout_s, is_last=True)
        if learner is not None and learner.failure is not None:
            _log.warning(
                "the learner left the run early, later work is only in its checkpoint", because=str(learner.failure)
            )
        if self._last_line:
            self._write(self._last_line | self._exchange())
        if learner is not None and not is_flushed:
            raise LearnerInputError(
                f"trained to the end, but the syncer did not take the last work within {timeout_s:g} s. "
                f"steps={learner.stats.unsent_step_count}. See whether it runs and has space, or raise "
                "--flush-timeout"
            )

    def _step(self) -> None:
        training, settings, clock, learner = self._training, self._settings, self._clock, self._learner
        batch = training.sampler.batch(self.position.step)
        rate = self._learning_rate()
        begun_s = clock.monotonic_s()
        limit = settings.optimizer.gradient_norm_limit
        loss, norm = inner_step(
            training.model, training.optimizer, batch.to(training.device), rate=rate, norm_limit=limit
        )
        if not torch.isfinite(norm):
            _log.warning("gradient is not finite, step skipped", step=self.position.step, norm=float(norm))
        loss_value = float(loss)
        compute_s = clock.monotonic_s() - begun_s
        slowdown_s = (settings.slowdown - 1.0) * compute_s
        clock.block(slowdown_s)
        self.position = TrainingPosition(
            step=self.position.step + 1,
            tokens=self.position.tokens + batch.token_count,
            time_s=clock.monotonic_s() - self._started_s,
        )
        begun_s = clock.monotonic_s()
        if learner is not None:
            learner.step(batch.token_count, loss_value)
        self._report(
            loss=loss_value,
            learning_rate=rate,
            step_time_ms=compute_s * 1e3,
            slowdown_ms=slowdown_s * 1e3,
            sync_stall_ms=(clock.monotonic_s() - begun_s) * 1e3,
        )

    def _learning_rate(self) -> float:
        optimizer, learner = self._settings.optimizer, self._learner
        horizon = optimizer.horizon_steps
        position = float(self.position.step)
        if learner is not None and (progress := learner.progress) is not None:
            planned = learner.planned_step_count
            position = run_position(self.position.step, progress, horizon_steps=horizon, planned_step_count=planned)
        return learning_rate(
            position, peak=optimizer.peak_rate, warmup_steps=optimizer.warmup_steps, horizon_steps=horizon
        )

    def _is_due(self, every: int) -> bool:
        return bool(every) and self.position.step % every == 0

    def _report(self, **measured: float) -> None:
        """Writes the step's metrics line, `measured` among its fields, and its log line if that is due."""
        settings, position = self._settings, self.position
        is_last = position.step == settings.step_count
        has_evaluation = self._is_due(settings.evaluate_every) or (is_last and settings.evaluate_every)
        self._last_line = {
            "learner": settings.learner_id,
            "attempt": self._metrics.attempt,
            "time_s": position.time_s,
            "step": position.step,
            "tokens": position.tokens,
            **measured,
            "val_loss": evaluate(self._training.model, self._training.held_out) if has_evaluation else None,
        }
        self._write(self._last_line | self._exchange())
        if self._is_due(settings.log_every) or (is_last and settings.log_every):
            shown = ("learner", "step", "loss", "val_loss", "step_time_ms", "sync_stall_ms")
            _log.info("step", **{name: _rounded(self._last_line[name]) for name in shown})

    def _exchange(self) -> dict[str, Any]:
        """Returns the fields of a metrics line that go on to change after its step."""
        fields: dict[str, Any] = {"unix_s": self._clock.unix_s()}
        if self._learner is None:
            return fields
        stats = self._learner.stats
        return {
            **fields,
            "run_progress": self._learner.progress,
            "parameters_up": stats.parameters_up_count,
            "parameters_down": stats.parameters_down_count,
            "versions": dict(stats.versions),
            **{name: getattr(stats, name) for name in _EXCHANGE_FIELDS},
        }

    def _write(self, line: dict[str, Any]) -> None:
        try:
            self._metrics.write(line)
        except OSError as error:
            if not self._has_lost_lines:
                _log.warning("metrics can't be written, training goes on", step=line["step"], because=str(error))
            self._has_lost_lines = True


def _rounded(value: Any) -> Any:
    return round(value, 4) if isinstance(value, float) else value
