"""Takes the steps of a learner whose training is made up, so that deltas of all fragments are due at one moment."""

from __future__ import annotations

import time
from collections.abc import Collection
from threading import Event
from typing import Final
from unittest.mock import patch

from skerry import ArrayLearner
from skerry.algorithm.schedule import RoundRhythm
from skerry.array_learner import SingleProcess

# More than the steps that a synchronisation waits for its versions, so that none makes a second delta due.
H: Final = 2048
_STEP_S: Final = 0.01


def steps_are_made_up() -> None:
    """Has learners of this process believe neither in training nor in time: thousands of steps take no time here.

    They never take themselves for slow: two that do send their deltas before H steps, which open no round until H steps
    later.
    """
    patch.object(RoundRhythm, "is_near", lambda *_, **__: False).start()


class DueSteps:
    """The steps of one learner, which was made after `steps_are_made_up` with a policy of H inner steps."""

    def __init__(self, learner: ArrayLearner) -> None:
        self._learner = learner
        self._count = 0
        self._first_due, self._all_due = H, 2 * H  # steps: the weights of each fragment are copied at one between them

    def approach(self) -> None:
        """Takes all steps before the next synchronisation but the last few."""
        self._step_to(self._first_due - 2)

    def synchronise(self, timeout_s: float) -> None:
        """Takes the steps that make a delta of each fragment due, and goes on until each has its next version.

        Raises:
            TimeoutError: not all have one in time.
        """
        missing, deadline_s = set(self._learner.stats.versions), time.monotonic() + timeout_s
        self._step_to(self._all_due)
        while missing:
            if time.monotonic() > deadline_s or self._count >= self._all_due + H:
                raise TimeoutError(f"no synchronisation. missing={sorted(missing)}, stats={self._learner.stats}")
            time.sleep(_STEP_S)
            missing -= set(self._step())
        self._first_due, self._all_due = self._all_due + H, self._count + H

    def _step_to(self, count: int) -> None:
        """Takes steps at one moment: the learner's own thread waits for their end, so it copies nothing before."""
        waits, are_over = Event(), Event()

        def wait() -> None:
            waits.set()
            are_over.wait()

        backend = self._learner._backend  # noqa: SLF001 - no public call stops a learner's thread
        assert isinstance(backend, SingleProcess)
        backend._thread.loop.call_soon_threadsafe(wait)  # noqa: SLF001 - no public call stops a learner's thread
        waits.wait()
        try:
            while self._count < count:
                self._step()
        finally:
            are_over.set()

    def _step(self) -> Collection[str]:
        """Takes one step; returns the fragments whose weights it changed."""
        self._count += 1
        return self._learner.step(tokens=1)
