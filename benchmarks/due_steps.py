"""Takes the steps of a learner whose training is made up, so that deltas of all fragments are due at one moment."""

from __future__ import annotations

import sys
import time
from typing import Final
from unittest.mock import patch

from skerry.client import ArrayLearner
from skerry.client.movement import Movement

# More than the steps that a synchronisation waits for its versions, so that none makes a second delta due.
H: Final = 4096
# Steps after which every delta is due, since the last ones were copied within so many steps of one another.
_SPREAD_STEPS: Final = 64
_STEP_S: Final = 0.01


def take_no_samples() -> None:
    """Has learners of this process not look for weights that were replaced.

    Their samples would let other threads run between two steps that are to be one moment; nothing is trained here.
    """
    patch.object(Movement, "trained").start()


class DueSteps:
    """The steps of one learner, which was made after `take_no_samples` with a policy of H inner steps."""

    def __init__(self, learner: ArrayLearner) -> None:
        self._learner = learner
        self._count = 0
        self._due_from = H  # all fragments were copied at this step or soon after; the first time H to 2 H are due

    def approach(self) -> None:
        """Takes all steps before the next synchronisation but the last few."""
        self._step_to(self._due_from + H - 2)

    def synchronise(self, timeout_s: float) -> None:
        """Takes the steps that make a delta of each fragment due, and goes on until each has its next version.

        Raises:
            TimeoutError: not all have one in time.
        """
        wanted = {name: version + 1 for name, version in self._learner.stats.versions.items()}
        deadline_s = time.monotonic() + timeout_s
        self._due_from += H + _SPREAD_STEPS
        self._step_to(self._due_from)
        while any(version < wanted[name] for name, version in self._learner.stats.versions.items()):
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"no synchronisation. versions={self._learner.stats.versions}, wanted={wanted}")
            time.sleep(_STEP_S)
            self._step_to(self._count + 1)

    def _step_to(self, count: int) -> None:
        """Takes steps at one moment: no other thread gets its turn before they are over."""
        interval_s = sys.getswitchinterval()
        sys.setswitchinterval(10.0)
        for _ in range(count - self._count):
            self._learner.step(tokens=1)
        sys.setswitchinterval(interval_s)
        self._count = count
