"""Notices weights that something other than training has replaced in place, before a delta is made of them.

The training thread takes a sample of the weights at every step, and waits for no GPU; a worker looks at them when a
delta is due. What is compared, and why, is in `skerry.algorithm.movement`.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from skerry.algorithm.movement import (
    MOVES_AFTER,
    MOVES_BEFORE,
    SHIFT_MOVES,
    SHIFTS,
    Move,
    Verdict,
    find_jump,
    judge_shift,
    move,
    squares,
)
from skerry.algorithm.rebase import FlatArray
from skerry.errors import StopExchangingError
from skerry.model.interface import Parameters

# Steps between two deltas, of all fragments, that are kept: 3 KiB each.
_LONGEST_WAIT: Final = 4096
# Of a piece that is shifted again, the moves between that tell whether the first shift stays.
_LEAST_MOVES: Final = 2
# Steps after a jump in which too few others moved the weights: nothing is left to compare it with, and work waits.
_UNDECIDED_STEPS: Final = 256
_CHECKPOINT: Final = (
    "the weights were replaced after attaching: load your checkpoint first, then attach; the run's weights win."
)


@dataclass
class _Shift:
    """What the exchange added to the weights at a step boundary, and the moves since."""

    values: FlatArray  # (pieces, PIECE_NUMEL), where the weights are
    square: FlatArray  # (pieces,)
    left: int = SHIFT_MOVES  # of the moves that may take it back
    moves: list[tuple[FlatArray, FlatArray]] = field(default_factory=list)  # their products with it, and their squares
    next_ones: list[tuple[int, FlatArray]] = field(default_factory=list)  # squares of later shifts, and moves by then


class Movement:
    """How a model's weights have moved lately."""

    def __init__(self, parameters: Parameters) -> None:
        """Call `settle` before the first step."""
        self._parameters = parameters
        self._last: FlatArray = None
        self._shifts: deque[_Shift] = deque()  # that moves may still take back; the training thread's
        self._shifted: deque[_Shift] = deque(maxlen=_LONGEST_WAIT)  # the training thread appends, and a worker takes
        self._verdicts: deque[Verdict] = deque(maxlen=SHIFTS)
        # The training thread appends, and a worker takes.
        self._taken: deque[tuple[int, tuple[FlatArray, ...]]] = deque(maxlen=_LONGEST_WAIT)
        self._step = 0  # the last that was judged
        self._moves: list[Move] = []
        self._cleared = 0  # of `_moves`: they are only what others are compared with
        self._lock = threading.Lock()  # of these three: each fragment's worker may ask

    def settle(self, *, has_adopted: bool = False) -> None:
        """Takes note that the exchange itself may have changed the weights; `has_adopted`: by versions of the run."""
        now = self._parameters.sample()
        if has_adopted and self._last is not None:
            values = now - self._last
            square = (values * values).sum(-1)
            for shift in self._shifts:
                shift.next_ones.append((len(shift.moves), square))
            self._shifts.append(_Shift(values, square))
        self._last = now

    def trained(self, step: int) -> None:
        """Takes note that the training loop has changed the weights, in its step of this number."""
        now = self._parameters.sample()
        squared = squares(self._last, now)
        self._taken.append((step, squared))
        for shift in self._shifts:
            shift.moves.append(((shift.values * (now - self._last)).sum(-1), squared[0]))
            shift.left -= 1
        while self._shifts and not self._shifts[0].left:
            self._shifted.append(self._shifts.popleft())
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
                one = move(step, *map(_on_host, squared))
                self._step = step
                if np.any(one.distances):
                    self._moves.append(one)
            jump = find_jump(self._moves, self._cleared)
            # A jump may be what was written over a version, which the moves since then tell.
            self._check_shifts([*self._shifts] if jump is not None and jump.is_certain else [])
            if jump is None or (not jump.is_certain and self._step >= jump.step + _UNDECIDED_STEPS):
                self._cleared = max(0, len(self._moves) - MOVES_AFTER)
                outdated = max(0, self._cleared - MOVES_BEFORE)
                del self._moves[:outdated]
                self._cleared -= outdated
                return True
        if jump.is_certain:
            raise StopExchangingError(
                "WEIGHTS_REPLACED",
                f"{_CHECKPOINT} In one step, most of them moved many times as far as in any step near it. "
                f"step={jump.step}",
            )
        return False

    def _check_shifts(self, others: list[_Shift]) -> None:
        """Looks whether what the exchange has added to the weights is still in them; `others` count this time only.

        Raises:
            StopExchangingError: WEIGHTS_REPLACED: it is not.
        """
        while self._shifted:
            verdict = _judged(self._shifted.popleft())
            if verdict.put_back or (verdict.counted and self._verdicts):
                self._verdicts.append(verdict)
        verdicts = [*self._verdicts, *map(_judged, others)]
        counted, put_back = (sum(verdict[place] for verdict in verdicts) for place in (0, 1))
        if Verdict(counted, put_back).is_taken_back:
            said = (
                "versions of the run that this learner adopted are gone from its weights some steps later: the "
                "optimizer keeps weights of its own, such as float32 masters or Lookahead's, and writes them over the "
                "model's, so that the next delta would take the versions back from the run. Say by `copies` where they "
                "are, and they get the same versions."
            )
            if others:  # a jump, too
                said = f"{_CHECKPOINT} Or {said}"
            raise StopExchangingError("WEIGHTS_REPLACED", f"{said} pieces={put_back} of {counted}, step={self._step}")


def _judged(shift: _Shift) -> Verdict:
    moves = [*shift.moves]  # the training thread may add to them
    length = np.sqrt(_on_host(shift.square))
    if not moves:
        return Verdict(0, 0)
    with np.errstate(invalid="ignore", divide="ignore"):
        shares = np.nan_to_num([-_on_host(product) / length**2 for product, _ in moves])
    usual = np.sqrt(np.median([_on_host(square) for _, square in moves], axis=0))
    for count, square in shift.next_ones:  # the next version of a piece: what is taken back from then on may be its
        is_shifted = _on_host(square) > 0
        shares[count:, is_shifted] = 0
        length[is_shifted & (count < _LEAST_MOVES)] = 0
    return judge_shift(length, list(shares), usual)


def _on_host(values: FlatArray) -> NDArray[np.float64]:
    return np.asarray(values.cpu() if hasattr(values, "cpu") else values, np.float64)
