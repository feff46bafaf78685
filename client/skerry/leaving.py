"""Leaves a run when a signal says that the machine goes away."""

from __future__ import annotations

import os
import signal
import sys
import threading
from functools import cache
from types import FrameType
from typing import Final

from skerry.array_learner import ArrayLearner

# What a shell adds to a signal's number for the exit status.
_SIGNALLED: Final = 128
_LEFT_ON: Final[set[signal.Signals]] = set()
_FORKING: Final = threading.local()


def leave_on_signal(learner: ArrayLearner, *signals: signal.Signals) -> None:
    """Has a learner leave its run on SIGTERM, or on `signals`, within a step and with all of its work.

        with Learner(model, target="syncer.example:443", run="gemma-12b") as learner:
            leave_on_signal(learner)
            for batch in loader:
                ...

    The step that is under way is finished: its `learner.step` raises SystemExit, and leaving the context sends the last
    work, for which it takes 10 s at most. The exit status is 128 and the signal's number, as a shell has it, also where
    the signal has ended a data loader's workers and so the loop. The same signal again changes nothing until the
    program has ended, since launchers pass on what the machine has sent to every process; SIGKILL ends it at once. In a
    program that goes on without its learner, the signal does what it did before. Where a notice comes in another way,
    call `learner.leave_soon()`. Processes that this one forks handle the signals as if no learner did.

    Raises:
        ValueError: this is not the main thread, which alone may handle signals.
    """
    _keep_from_children()
    for number in signals or (signal.SIGTERM,):
        _LEFT_ON.add(number)
        handler = _Handler(learner, number)
        signal.signal(number, handler)
        learner.when_left(handler.restore)


class _Handler:
    """Handles a signal until the learner has left, or until the program has ended if it ends because of the signal."""

    def __init__(self, learner: ArrayLearner, number: signal.Signals) -> None:
        self._learner = learner
        self._number = number
        self.previous = signal.getsignal(number) or signal.SIG_DFL  # None: of a program that is not Python
        self._is_told = False
        self._is_over = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._is_over:  # a handler of later gave the signal to this one
            signal.signal(number, self.previous)
            signal.raise_signal(number)
        else:
            self._is_told = True
            self._learner.leave_soon(_SIGNALLED + number)

    def restore(self) -> None:
        """Puts the handler before in place as the learner leaves; not over a later one, nor while the program ends."""
        self._is_over = not self._is_told or sys.exception() is None
        current: object = signal.getsignal(self._number)
        if current is self and self._is_over and threading.current_thread() is threading.main_thread():
            signal.signal(self._number, self.previous)


@cache
def _keep_from_children() -> None:
    """Has forked children handle signals as before; in between signals wait, since Python drops those of a fork."""
    os.register_at_fork(before=_block, after_in_parent=_unblock, after_in_child=_restore_in_child)


def _block() -> None:
    _FORKING.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _LEFT_ON)


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _FORKING.mask)


def _restore_in_child() -> None:
    for number in _LEFT_ON:
        handler: object = signal.getsignal(number)
        while isinstance(handler, _Handler):
            handler = handler.previous
            signal.signal(number, handler)
    _unblock()
