"""Notices weights that something other than training has replaced in place, before a delta is made of them.

The training thread takes a sample of the weights at every step, and waits for no GPU; a worker looks at them when a
delta is due. What is compared, and why, is in `skerry.algorithm.movement`.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Final

import numpy as np

from skerry.algorithm.movement import MOVES_AFTER, MOVES_BEFORE, Move, find_jump, move, squares
from skerry.algorithm.rebase import FlatArray
from skerry.client.errors import StopExchangingError
from skerry.client.parameters import Parameters

# Steps between two deltas, of all fragments, that are kept: 3 KiB each.
_LONGEST_WAIT: Final = 4096
# Steps after a jump in which too few others moved the weights: nothing is left to compare it with, and work waits.
_UNDECIDED_STEPS: Final = 256


class Movement:
    """How a model's weights have moved lately."""

    def __init__(self, parameters: Parameters) -> None:
        """Call `settle` before the first step."""
        self._parameters = parameters
        self._last: FlatArray = None
        # The training thread appends, and a worker takes.
        self._taken: deque[tuple[int, tuple[FlatArray, ...]]] = deque(maxlen=_LONGEST_WAIT)
        self._step = 0  # the last that was judged
        self._moves: list[Move] = []
        self._cleared = 0  # of `_moves`: they are only what others are compared with
        self._lock = threading.Lock()  # of these three: each fragment's worker may ask

    def settle(self) -> None:
        """Takes note that the exchange itself may have changed the weights."""
        self._last = self._parameters.sample()

    def trained(self, step: int) -> None:
        """Takes note that the training loop has changed the weights, in its step of this number."""
        now = self._parameters.sample()
        self._taken.append((step, squares(self._last, now)))
        self._last = now

    def is_clear(self) -> bool:
        """Returns whether training explains how the weights moved; False if the next steps will tell. In a worker.

        Raises:
            StopExchangingError: WEIGHTS_REPLACED: it does not.
        """
        with self._lock:
            new = [self._taken.popleft() for _ in range(len(self._taken))]
            self._parameters.synchronize()
            for step, squared in new:
                one = move(step, *map(self._parameters.to_host, squared))
                self._step = step
                if np.any(one.distances):
                    self._moves.append(one)
            jump = find_jump(self._moves, self._cleared)
            if jump is None or (not jump.is_certain and self._step >= jump.step + _UNDECIDED_STEPS):
                self._cleared = max(0, len(self._moves) - MOVES_AFTER)
                outdated = max(0, self._cleared - MOVES_BEFORE)
                del self._moves[:outdated]
                self._cleared -= outdated
                return True
        if jump.is_certain:
            raise StopExchangingError(
                "WEIGHTS_REPLACED",
                "the weights were replaced after attaching: load your checkpoint first, then attach; the run's weights "
                "win. In one step, most of them moved many times as far as in any step near it. "
                f"step={jump.step}",
            )
        return False
