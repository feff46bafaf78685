"""The training loop: inner steps, and after each one a call of the client's `Learner`, which never waits."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

import torch

from skerry import SkerryError, Stats
from skerry.runtime.clock import ThreadClock
from skerry.runtime.logs import get_logger
from skerry_learner.batches import Batch, BatchSampler, held_out_batches
from skerry_learner.checkpoint import TrainingPosition, load_checkpoint, save_checkpoint
from skerry_learner.corpus import load_corpus
from skerry_learner.errors import LearnerInputError
from skerry_learner.inner_training import InnerOptimizer, evaluate, inner_step, make_optimizer
from skerry_learner.metrics import MetricsLine, MetricsWriter, read_metrics
from skerry_learner.model import Gpt
from skerry_learner.schedule import LearningRateSchedule, run_position
from skerry_learner.settings import LearnSettings

_log = get_logger(__name__)

# Fields that a metrics line takes from the client's Stats, under the same names.
_EXCHANGE_FIELDS: Final = (
    "is_attached", "staleness", "bytes_up", "bytes_down", "deltas_acknowledged", "deltas_merged",
    "deltas_returned", "deltas_dropped", "dropped_step_count",
)  # fmt: skip


class AttachedLearner(Protocol):
    """What the loop uses of `skerry.Learner`. Only `flush` waits for the network."""

    def step(self, tokens: int, loss: float | None = None) -> object:
        """Counts one finished inner step; may replace parameters of the model."""

    def flush(self, timeout_s: float, *, is_last: bool = False) -> bool:
        """Sends what is unsent and waits at most `timeout_s` until it is acknowledged; `is_last`: it trains no more."""

    @property
    def stats(self) -> Stats:
        """What was exchanged so far."""

    @property
    def progress(self) -> float | None:
        """Inner steps of the run, or None while they are not known."""

    @property
    def planned_step_count(self) -> int:
        """Inner steps that the run is planned to take, or 0."""

    @property
    def is_closed(self) -> bool:
        """Whether the run is closed, so that later work is not merged."""

    @property
    def failure(self) -> SkerryError | None:
        """Why this learner no longer exchanges, if it does not."""


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
    attempt: int


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
        raise LearnerInputError(
            f"no such device. device={name}, cause={str(error).splitlines()[0]}. pass another --device, or auto"
        ) from error
    return device


def prepare(settings: LearnSettings) -> Training:
    """The model, its data and its optimizer, resumed from the local checkpoint where there is one.

    Raises:
        LearnerInputError: the data cannot be read, or is too short.
        LearnerInputError: the checkpoint cannot be resumed.
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
    loaded = load_checkpoint(settings.checkpoint_path, model=model, optimizer=optimizer)
    position = loaded or TrainingPosition()
    attempt = 1 + max((line.attempt for line in read_metrics(settings.metrics_path)), default=-1)
    _log.info(
        "learner ready",
        learner=settings.learner_id,
        data=corpus.description,
        train_tokens=len(corpus.train),
        held_out_tokens=len(corpus.held_out),
        parameters=model.parameter_count,
        device=str(device),
        resumed_step=position.step if loaded else None,
    )
    return Training(
        settings=settings,
        device=device,
        model=model,
        optimizer=optimizer,
        sampler=sampler,
        held_out=[batch.to(device) for batch in held_out],
        position=position,
        attempt=attempt,
    )


def train(
    training: Training, learner: AttachedLearner | None, *, clock: ThreadClock, stop: threading.Event
) -> TrainingPosition:
    """Train until the steps are done, the run is closed or `stop` is set, and return the position reached.

    Without a `learner` this is plain training, a baseline to compare with. `stop` is checked between steps. At the end
    a checkpoint is written, the learner is flushed, and the checkpoint is written again, with what is sent then. A full
    disk does not stop training.

    Raises:
        LearnerInputError: the last checkpoint could not be written.
        LearnerInputError: the last work was not acknowledged.
    """
    with MetricsWriter(training.settings.metrics_path) as writer:
        loop = _Loop(training, learner, clock=clock, writer=writer)
        try:
            loop.run(stop)
        finally:
            # Also after a failed step: the work until then is worth keeping.
            is_saved = loop.save()
        try:
            loop.end()
        finally:
            if learner is not None:
                is_saved = loop.save()
    if not is_saved:
        path = training.settings.checkpoint_path
        raise LearnerInputError(
            f"trained to the end, but cannot write the checkpoint. path={path}. free space or pass another --work-dir"
        )
    return loop.position


class _Loop:
    """The loop's own state: the position, and the last metrics line that it wrote."""

    def __init__(
        self, training: Training, learner: AttachedLearner | None, *, clock: ThreadClock, writer: MetricsWriter
    ) -> None:
        self.position = training.position
        self._training = training
        self._learner = learner
        self._clock = clock
        self._writer = writer
        self._last_line: MetricsLine | None = None
        self._has_lost_lines = False
        self._started_s = clock.monotonic_s() - training.position.time_s
        optimizer = training.settings.optimizer
        self._schedule = LearningRateSchedule(optimizer.peak_rate, optimizer.warmup_steps, optimizer.horizon_steps)

    def run(self, stop: threading.Event) -> None:
        settings = self._training.settings
        while self.position.step < settings.step_count:
            if stop.is_set():
                _log.info("stopping on request", step=self.position.step)
                return
            if self._learner is not None and self._learner.is_closed:
                _log.info("the run is closed", step=self.position.step)
                return
            self._step()
            if settings.checkpoint_every and self.position.step % settings.checkpoint_every == 0:
                self.save()

    def save(self) -> bool:
        """Write the checkpoint and return whether that succeeded; training goes on without it."""
        training = self._training
        path = training.settings.checkpoint_path
        try:
            save_checkpoint(
                path,
                model=training.model,
                optimizer=training.optimizer,
                position=self.position,
            )
        except OSError as error:
            _log.warning("checkpoint can't be written, training goes on", path=str(path), because=str(error))
            return False
        return True

    def end(self) -> None:
        """Flush the learner, and write the last metrics line again, so that the file ends with the final counts.

        Raises:
            LearnerInputError: the last work was not acknowledged.
        """
        timeout_s, is_flushed = self._training.settings.flush_timeout_s, True
        if self._learner is not None:
            is_flushed = self._learner.flush(timeout_s, is_last=True)
            if (failure := self._learner.failure) is not None:
                _log.warning(
                    "the learner left the run early, later work is only in its checkpoint", because=str(failure)
                )
        if self._last_line is not None:
            self._write(self._with_exchange(self._last_line))
        if self._learner is not None and not is_flushed:
            raise LearnerInputError(
                f"trained to the end, but the syncer did not take the last work within {timeout_s:g} s. "
                f"steps={self._learner.stats.unsent_step_count}. See whether it runs and has space, or raise "
                "--flush-timeout"
            )

    def _schedule_position(self) -> float:
        if self._learner is None or (progress := self._learner.progress) is None:
            return float(self.position.step)
        horizon = self._training.settings.optimizer.horizon_steps
        return run_position(
            self.position.step, progress, horizon_steps=horizon, planned_step_count=self._learner.planned_step_count
        )

    def _step(self) -> None:
        training, clock, learner = self._training, self._clock, self._learner
        rate = self._schedule.rate(self._schedule_position())
        begun_s = clock.monotonic_s()
        loss, token_count = self._train_on(training.sampler.batch(self.position.step), rate)
        compute_s = clock.monotonic_s() - begun_s
        slowdown_s = (training.settings.slowdown - 1.0) * compute_s
        clock.block(slowdown_s)
        self.position = TrainingPosition(
            step=self.position.step + 1,
            tokens=self.position.tokens + token_count,
            time_s=clock.monotonic_s() - self._started_s,
        )
        begun_s = clock.monotonic_s()
        if learner is not None:
            learner.step(token_count, loss)
        self._report(
            loss,
            rate,
            step_time_ms=compute_s * 1e3,
            slowdown_ms=slowdown_s * 1e3,
            sync_stall_ms=(clock.monotonic_s() - begun_s) * 1e3,
        )

    def _train_on(self, batch: Batch, rate: float) -> tuple[float, int]:
        training = self._training
        loss, norm = inner_step(
            training.model,
            training.optimizer,
            batch.to(training.device),
            rate=rate,
            norm_limit=training.settings.optimizer.gradient_norm_limit,
        )
        if not torch.isfinite(norm):
            _log.warning("gradient is not finite, step skipped", step=self.position.step, norm=float(norm))
        return float(loss), batch.token_count

    def _report(self, loss: float, rate: float, **times_ms: Any) -> None:
        """Writes the step's metrics line; `times_ms` are fields of the line."""
        settings, step = self._training.settings, self.position.step
        every = settings.evaluate_every
        is_due = bool(every) and (step % every == 0 or step == settings.step_count)
        line = MetricsLine(
            learner=settings.learner_id,
            attempt=self._training.attempt,
            time_s=self.position.time_s,
            unix_s=self._clock.unix_s(),
            step=step,
            tokens=self.position.tokens,
            loss=loss,
            learning_rate=rate,
            val_loss=evaluate(self._training.model, self._training.held_out) if is_due else None,
            **times_ms,
        )
        line = self._with_exchange(line)
        self._write(line)
        self._last_line = line
        if settings.log_every and (step % settings.log_every == 0 or step == settings.step_count):
            _log.info(
                "step",
                learner=settings.learner_id,
                step=step,
                loss=round(loss, 4),
                val_loss=None if line.val_loss is None else round(line.val_loss, 4),
                step_time_ms=round(line.step_time_ms, 1),
                sync_stall_ms=round(line.sync_stall_ms, 2),
                staleness=line.staleness,
            )

    def _write(self, line: MetricsLine) -> None:
        try:
            self._writer.write(line)
        except OSError as error:
            if not self._has_lost_lines:
                _log.warning("metrics can't be written, training goes on", step=line.step, because=str(error))
            self._has_lost_lines = True

    def _with_exchange(self, line: MetricsLine) -> MetricsLine:
        line = replace(line, unix_s=self._clock.unix_s())
        if self._learner is None:
            return line
        stats = self._learner.stats
        return replace(
            line,
            run_progress=self._learner.progress,
            parameters_up=stats.parameters_up_count,
            parameters_down=stats.parameters_down_count,
            versions=dict(stats.versions),
            **{name: getattr(stats, name) for name in _EXCHANGE_FIELDS},
        )
