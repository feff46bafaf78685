"""Leaves a run when a signal says that the machine goes away."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Final

from skerry.client.array_learner import ArrayLearner

# What a shell adds to a signal's number for the exit status.
_SIGNALLED: Final = 128


def leave_on_signal(learner: ArrayLearner, *signals: signal.Signals) -> None:
    """Has a learner leave its run on SIGTERM, or on `signals`, within a step and with all of its work.

        with Learner(model, target="syncer.example:443", run="gemma-12b") as learner:
            leave_on_signal(learner)
            for batch in loader:
                ...

    The step that is under way is finished: its `learner.step` raises SystemExit, and leaving the context sends the last
    work, for which it takes 10 s at most. The exit status is 128 and the signal's number, as a shell has it. A second
    signal does what it did before. Where a notice comes in another way, call `learner.leave_soon()`.

    Raises:
        ValueError: this is not the main thread, which alone may handle signals.
    """
    for number in signals or (signal.SIGTERM,):
        previous = signal.getsignal(number)

        def leave(received: int, _frame: FrameType | None, previous: signal._HANDLER = previous) -> None:
            signal.signal(received, previous)
            learner.leave_soon(_SIGNALLED + received)

        signal.signal(number, leave)
