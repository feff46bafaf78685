"""Lightning: a callback with which a `Trainer` trains together with the other learners of a run."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, XLAStrategy

from skerry.client import Learner, attach
from skerry.integrations.callbacks import CallbackLearner

__all__ = ["SkerryCallback"]

_REFUSED: Final = (DeepSpeedStrategy, FSDPStrategy, XLAStrategy)


class SkerryCallback(Callback):  # type: ignore[misc]  # untyped
    """Attaches when training begins, after a checkpoint was loaded, and leaves when it ends, also by an exception.

        Trainer(callbacks=[SkerryCallback(target="syncer:443", run="gemma-12b", tokens_per_step=32 * 1024)]).fit(...)

    A step of the run is a step of the optimizer with all its accumulated batches (with several optimizers, of the last
    one), and the planned length is the trainer's estimate of them. Checkpoints that are saved during training hold this
    learner's weights and, with one process, its work that the run does not have yet; after `fit` the module has the
    run's weights, merged, which `save_checkpoint` writes. The logs get `skerry/...`. With several processes
    (`devices=2, strategy="ddp"`) they are one learner together.

    Args:
        tokens_per_step: as `skerry.client.attach` says.
        leave_on_signal: on SIGTERM, end training after the step under way, with all of its work sent: `fit` raises
            SystemExit, as `skerry.client.leave_on_signal` says. With one process Lightning does so by itself.
        **options: as `Learner` says, `target` and `run` among them.

    Raises:
        TypeError: an option is not known, or `target` or `run` is missing.
    """

    def __init__(
        self, *, tokens_per_step: int | Callable[[], int], leave_on_signal: bool = False, **options: Any
    ) -> None:
        self._part = CallbackLearner(options, leave_on_signal=leave_on_signal)
        self._tokens_per_step = tokens_per_step

    @property
    def learner(self) -> Learner | None:
        """The learner; None before training and after it."""
        return self._part.learner

    def state_dict(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps: the learner's `state_dict`."""
        return self._part.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes what a checkpoint has, for the learner that is yet to attach."""
        self._part.saved = state_dict

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attaches the module.

        Raises:
            ValueError: the strategy keeps the weights in a form of its own, as DeepSpeed does; or the checkpoint is of
                another model.
            SkerryError: as `Learner`.
        """
        step_count = trainer.estimated_stepping_batches
        self._part.begin(
            partial(attach, pl_module, trainer.optimizers[-1], tokens_per_step=self._tokens_per_step),
            process_count=trainer.world_size,
            step_count=int(step_count) if 0 < step_count < math.inf else None,
            refused=type(trainer.strategy).__name__ if isinstance(trainer.strategy, _REFUSED) else None,
        )

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Logs `skerry/...`."""
        pl_module.log_dict(self._part.metrics)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leaves, with the run's weights in the module."""
        self._part.leave(load_merged=True)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Sends the steps that were completed, with one process, and leaves."""
        self._part.leave(load_merged=False)
