"""Lightning: a callback with which a `Trainer` trains together with the other learners of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning, StochasticWeightAveraging
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, XLAStrategy

from skerry import Learner, attach
from skerry.integrations.callbacks import CallbackLearner
from skerry.learner import token_counter

__all__ = ["SkerryCallback"]

_REFUSED: Final = (DeepSpeedStrategy, FSDPStrategy, XLAStrategy)


class SkerryCallback(Callback):  # type: ignore[misc]  # untyped
    """Attaches when training begins, after a checkpoint was loaded, and leaves when it ends, also by an exception.

        Trainer(callbacks=[SkerryCallback(target="syncer:443", run="gemma-12b", tokens_per_step=32 * 1024)]).fit(...)

    A step of the run is a step of the optimizer with all its accumulated batches (with several optimizers, of the last
    one). Checkpoints that are saved during training hold this learner's weights and its counts; after `fit` the module
    has the run's weights, merged, which `save_checkpoint` writes. The logs get `skerry/...`. Several processes
    (`devices=2, strategy="ddp"`, `ModelParallelStrategy`) are one learner together.

    Where a callback averages the weights, as WeightAveraging and StochasticWeightAveraging do, learners exchange the
    weights that are trained, and the module has the average after `fit`. Where one unfreezes layers (BaseFinetuning),
    all parameters of the module take part from the start, also frozen ones.

    Args:
        tokens_per_step: as `skerry.attach` says.
        leave_on_signal: on SIGTERM, end training after the step under way, with all of its work sent: `fit` raises
            SystemExit, as `skerry.leave_on_signal` says. With one process Lightning does so by itself.
        **options: as `Learner` says, `target` and `run` among them.

    Raises:
        TypeError: an option is not known, or `target` or `run` is missing.
    """

    def __init__(
        self, *, tokens_per_step: int | Callable[[], int], leave_on_signal: bool = False, **options: Any
    ) -> None:
        self._part = CallbackLearner(options, leave_on_signal=leave_on_signal)
        self._tokens_per_step = token_counter(tokens_per_step)
        self._saved: dict[str, Any] = {}

    @property
    def learner(self) -> Learner | None:
        """The learner; None before training and after it."""
        return self._part.learner

    def state_dict(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps: the learner's `state_dict`."""
        return {} if self.learner is None else self.learner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes what a checkpoint has, for the learner that is yet to attach."""
        self._saved = state_dict

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attaches the module.

        Raises:
            ValueError: the strategy keeps the weights in a form of its own, as DeepSpeed does.
            SkerryError: as `Learner`.
        """
        # Other callbacks then put an average into the module after this one has left.
        trainer.callbacks = [self, *(callback for callback in trainer.callbacks if callback is not self)]
        with _unfrozen(pl_module, any(isinstance(callback, BaseFinetuning) for callback in trainer.callbacks)):
            self._begin(trainer, pl_module)
        if self._saved and self.learner is not None:
            self.learner.load_state_dict(self._saved)

    def _begin(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._part.begin(
            partial(attach, pl_module, trainer.optimizers[-1], tokens_per_step=self._tokens_per_step),
            process_count=trainer.world_size,
            refused=type(trainer.strategy).__name__ if isinstance(trainer.strategy, _REFUSED) else None,
        )

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leaves before an epoch that trains nothing: it measures the averaged weights' batches for their norms."""
        averaging = [callback for callback in trainer.callbacks if isinstance(callback, StochasticWeightAveraging)]
        if any(trainer.current_epoch == callback.swa_end + 1 for callback in averaging):
            self._part.leave(load_merged=True)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Logs `skerry/...`."""
        pl_module.log_dict(self._part.metrics)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leaves, with the run's weights in the module."""
        self._part.leave(load_merged=True)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Sends the steps that were completed, with one process, and leaves."""
        self._part.leave(load_merged=False)


@contextmanager
def _unfrozen(module: LightningModule, is_needed: bool) -> Iterator[None]:  # noqa: FBT001 - private
    """Has all floating-point parameters be trainable in the meantime, if that is needed."""
    frozen = [
        weight
        for weight in module.parameters()
        if is_needed and weight.is_floating_point() and not weight.requires_grad
    ]
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)
