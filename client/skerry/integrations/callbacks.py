"""What the callbacks of all trainers share: the options, and how a learner leaves at the end of training."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Final

from skerry import Learner, SkerryError, leave_on_signal
from skerry.array_learner import settings_of
from skerry.integrations.metrics import learner_metrics
from skerry.runtime.logs import get_logger

_log = get_logger(__name__)

# How long the end of training waits for the last work to be merged; other learners have to finish a step for it.
_MERGE_TIMEOUT_S: Final = 60.0


class CallbackLearner:
    """A callback's part in a run, from the start of its training to the end.

    Args:
        options: the arguments of `Learner` except the model.
        leave_on_signal: whether SIGTERM makes the learner leave, as `skerry.leave_on_signal` does.

    Raises:
        TypeError: an option is not known, or `target` or `run` is missing.
        ValueError: an option can't be right.
    """

    def __init__(self, options: Mapping[str, Any], *, leave_on_signal: bool) -> None:
        # Now, rather than after the model was loaded.
        settings_of(**{name: value for name, value in options.items() if name not in {"copies", "process_group"}})
        self.learner: Learner | None = None
        self._options = options
        self._leaves_on_signal = leave_on_signal
        self._has_several_ranks = False
        self._handled: BaseException | None = None
        self._restoring = ExitStack()  # what is changed in the process while the learner is there

    def begin(self, attach: Callable[..., Learner], *, process_count: int, refused: str | None) -> None:
        """Attaches by `attach(**options)`.

        Raises:
            ValueError: the weights are not where a learner could change them.
            SkerryError: as `Learner`.
        """
        if refused is not None:
            raise ValueError(
                "SkerryCallback trains with one process, with DistributedDataParallel and with fully_shard (FSDP2), "
                f"where the weights of the model are the ones that are trained. Use one of these. strategy={refused}"
            )
        self._has_several_ranks = process_count > 1
        self._handled = sys.exception()  # an error before training that the caller has handled
        if self.learner is not None:  # the trainer begins anew, with a smaller batch for instance
            self.learner.close()
        self._restoring.close()
        self.learner = attach(**self._options)
        if not self.learner.planned_token_count:
            _log.warning("the run has no planned length: give planned_token_count, the tokens of all its learners")
        self._leave_if_the_process_fails()
        if self._leaves_on_signal:
            leave_on_signal(self.learner)

    def leave(self, *, load_merged: bool, error: BaseException | None = None) -> None:
        """Sends the last work for a bounded time and leaves the run. Idempotent; failures are logged, not raised.

        With `load_merged` the model has the run's weights afterwards, if the last work is merged in time. While an
        error ends a rank of several, its island sends nothing: the other ranks may not have done the same steps.
        """
        learner, self.learner = self.learner, None
        if learner is None:
            return
        with self._restoring:
            self._leave(learner, error or sys.exception(), load_merged=load_merged)

    def _leave(self, learner: Learner, error: BaseException | None, *, load_merged: bool) -> None:
        if self._has_several_ranks and error is not None and error is not self._handled:
            learner.__exit__(type(error), error, None)
            return
        try:
            work = learner.leave(_MERGE_TIMEOUT_S, load_merged=True) if load_merged else learner.leave()
        except SkerryError as failure:  # the model is trained, and the trainer has things to do with it
            _log.error("the last work is not in the run", because=str(failure))
            return
        if load_merged and not work.is_loaded:
            _log.warning(
                "the last work was not merged in time, so the model keeps this learner's own weights. "
                "`skerry export` writes the run's",
                timeout_s=_MERGE_TIMEOUT_S,
            )

    def _leave_if_the_process_fails(self) -> None:
        """Has an unhandled error, Ctrl-C included, leave the run after it was printed."""
        previous = sys.excepthook

        def leave(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
            previous(kind, error, traceback)
            self.leave(load_merged=False, error=error)

        def restore() -> None:
            if sys.excepthook is leave:
                sys.excepthook = previous

        sys.excepthook = leave
        self._restoring.callback(restore)

    @property
    def metrics(self) -> dict[str, float]:
        """What to log; nothing before training and after it."""
        return {} if self.learner is None else learner_metrics(self.learner)
