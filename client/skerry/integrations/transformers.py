"""Hugging Face: a callback with which a `Trainer` trains together with the other learners of a run."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import CallbackHandler

from skerry import Learner
from skerry.integrations.callbacks import CallbackLearner
from skerry.learner import token_counter

__all__ = ["SkerryCallback"]


class SkerryCallback(TrainerCallback):  # type: ignore[misc]  # untyped
    """Attaches when training begins, after a checkpoint was loaded, and leaves after the last step.

        Trainer(..., callbacks=[SkerryCallback(target="syncer:443", run="gemma-12b")]).train()

    A step of the run is a step of the optimizer with all its accumulated batches, and the learning rate follows the
    trainer's own steps. Checkpoints that are saved during training hold this learner's weights. What `save_model`
    writes afterwards holds the run's weights, merged, and so does the last checkpoint, unless an evaluation ended
    training. Where the trainer loads its best checkpoint at the end, that is what it has then. A trainer that resumes,
    with any number of processes, begins with the run's weights and counts its steps on.

    An error that ends the process, or Ctrl-C, first sends what was learned, within 10 s. A trainer tells callbacks
    nothing of exceptions, so where you handle them yourself, as in a notebook, call `leave`.

    Started by torchrun, the processes are one learner together. With several, an error loses what was not sent yet.

    The logs get `skerry/...`, also those that the trackers of `report_to` keep.

    Args:
        tokens_per_step: what this island trains on in one step; by default the trainer counts the elements of the
            model's main input.
        leave_on_signal: on SIGTERM, end training after the step under way, with all of its work sent: `train` raises
            SystemExit, as `skerry.leave_on_signal` says. For other notices call `learner.leave_soon`.
        **options: as `Learner` says, `target` and `run` among them.

    Raises:
        TypeError: an option is not known, or `target` or `run` is missing.
    """

    def __init__(self, *, tokens_per_step: int | None = None, leave_on_signal: bool = False, **options: Any) -> None:
        self._part = CallbackLearner(options, leave_on_signal=leave_on_signal)
        if tokens_per_step is not None:
            token_counter(tokens_per_step)
        self._tokens_per_step = tokens_per_step
        self._token_count = 0  # of the trainer, at the last step
        self._loss: float | None = None
        self._early = _EarlyLog(self)

    @property
    def learner(self) -> Learner | None:
        """The learner; None before training and after it."""
        return self._part.learner

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Attaches the model.

        Raises:
            ValueError: the weights are in a form of their own, as with DeepSpeed.
            SkerryError: as `Learner`.
        """
        if self._tokens_per_step is None and args.include_num_input_tokens_seen == "no":
            args.include_num_input_tokens_seen = "all"
        self._token_count = state.num_input_tokens_seen
        self._early.precede_trackers()
        self._part.begin(
            partial(Learner, kwargs["model"]),
            process_count=args.world_size,
            refused=None if args.deepspeed_plugin is None else "DeepSpeed",
        )
        assert self.learner is not None  # it has begun
        counted = self._tokens_per_step
        tokens = state.num_input_tokens_seen if counted is None else counted * state.global_step * args.world_size
        self.learner.count_from(state.global_step, tokens)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Counts a step. After the last one it leaves, before the trainer evaluates and saves.

        Raises:
            ValueError: the trainer does not know how many tokens it trains on.
            SystemExit, StopExchangingError: as `Learner.step`.
        """
        if self.learner is None:
            return
        token_count = self._tokens_since(state.num_input_tokens_seen)
        try:
            # The trainer's count is of all ranks, and the learner adds up what they give.
            self.learner.step(token_count if state.is_world_process_zero else 0, self._loss)
        except SystemExit:
            self._part.leave(load_merged=False)
            raise
        if control.should_training_stop:
            self._part.leave(load_merged=True)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **_: Any,
    ) -> None:
        """Adds `skerry/...` for all callbacks and for the trainer's history, once, and notes the loss.

        Leaves at the trainer's last log, which comes after whatever ended training and before the best checkpoint is
        loaded.
        """
        if logs is not None and "total_flos" in logs:
            self._part.leave(load_merged=True)
        metrics = self._part.metrics
        if logs is None or metrics.keys() <= logs.keys():
            return
        self._loss = logs.get("loss", self._loss)
        logs.update(metrics)
        state.log_history[-1].update(metrics)

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Leaves if training was ended after the step, before the trainer evaluates and saves."""
        if control.should_training_stop:
            self._part.leave(load_merged=True)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Leaves if the trainer has not logged its end."""
        self._part.leave(load_merged=True)

    def leave(self) -> None:
        """Sends the steps that were completed, and leaves the run, on all ranks if there are several. Idempotent."""
        self._part.leave(load_merged=False)

    def _tokens_since(self, token_count: int) -> int:
        if self._tokens_per_step is not None:
            return self._tokens_per_step
        since, self._token_count = token_count - self._token_count, token_count
        if since < 1:
            raise ValueError(
                "the trainer counts no tokens of this model: its `main_input_name` is not in the batches. Give "
                "SkerryCallback tokens_per_step, by which this learner's work is weighed against the others'"
            )
        return since


class _EarlyLog(TrainerCallback):  # type: ignore[misc]  # untyped
    """Has the metrics added before the trackers of `report_to` read the logs: these come before a user's callbacks."""

    def __init__(self, skerry: SkerryCallback) -> None:
        self.on_log = skerry.on_log

    def precede_trackers(self) -> None:
        """Puts this one first; the trainer gives callbacks no way to its list of them but the call itself."""
        frame = inspect.currentframe()
        while frame is not None:
            handler = frame.f_locals.get("self")
            if isinstance(handler, CallbackHandler):
                if self not in handler.callbacks:
                    handler.callbacks = [self, *handler.callbacks]  # anew: the old list is gone through just now
                return
            frame = frame.f_back
