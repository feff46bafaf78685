"""Whether weights moved as training moves them, by small samples of them before and after each step's training.

A sample has up to 64 pieces of a model, spread evenly over its elements, each of up to 64 elements in a row. Of a piece
that was x before a step and is y after it,

    d = |y - x|                                         (1)  how far it moved
    s = sqrt(1 - (x y)^2 / (x^2 y^2))                   (2)  sine of the angle between; 1 where x or y is 0

A step replaced the weights if at least half of the pieces have

    s >= 0.3  and  s d / max(d', of the 32 moves before and the 4 after) >= 16      (3)

Training moves weights alike in steps that are near to each other, however far it moves them: a learning rate that rises
stays high in the steps that follow, so the move before them is no larger than theirs. Moves of no length, as where
gradients are accumulated, do not count. Weights that are only scaled keep their direction, so (2) leaves them out. (3)
is decided once there are 4 moves after the step; if 256 steps bring fewer, the step counts as training.

The exchange itself shifts the weights when it adopts a version. Training goes on from there; an optimizer that keeps
weights of its own writes them back, at once or some steps later, and so takes the shift a back. Of a piece that a has
shifted, and of the moves m that follow,

    c = -(a m) / a^2                                    (4)  the share of the shift that a move takes back

A piece was put back if one of up to 8 moves has c >= 0.4, and one after it and all others have c <= 0.1. Training that
turns back does so in many steps, each by a share of what is left. Only pieces count whose shift is at least 4 times as
long as the median of these moves, for short ones tell nothing. Of all that count since the first one that was put back,
within 8 shifts, half and at least 12 must have been put back.

Source: Skerry's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from skerry.algorithm.rebase import FlatArray

PIECE_NUMEL: Final = 64
"""Elements of a piece at most."""
MOVES_BEFORE: Final = 32
"""Moves before a step with which it is compared, at most."""
MOVES_AFTER: Final = 4
"""Moves after a step with which it is compared."""
_PIECES: Final = 64
# In smaller models some kinds of training find the solution in one step.
_LEAST_NUMEL: Final = 1024
# What training reaches, and what other weights in their place do.
_LEAST_SINE: Final = 0.3
_LEAST_RATIO: Final = 16.0

SHIFT_MOVES: Final = 8
"""Moves after a shift that may take it back."""
SHIFTS: Final = 8
"""The last shifts by which it is decided whether they are taken back."""
_LEAST_BACK: Final = 0.4  # Lookahead takes back a half
_MOST_BACK: Final = 0.1
_LEAST_SHIFT: Final = 4.0
_LEAST_PIECES: Final = 12
_LEAST_SHARE: Final = 0.5

Place: TypeAlias = tuple[str, tuple[Any, ...]]
"""A piece: the name of its tensor, and the index that gives it."""


class Move(NamedTuple):
    """What one step did to each piece."""

    step: int
    distances: NDArray[np.float64]  # (pieces,) equation (1)
    sines: NDArray[np.float64]  # (pieces,) equation (2)


class Jump(NamedTuple):
    """A step that moved the weights as no other one near it."""

    step: int
    is_certain: bool  # there were enough moves after it


def places(shapes: Mapping[str, tuple[int, ...]]) -> list[Place]:
    """Returns the pieces of a model whose tensors have these shapes; none of a model that is too small to judge."""
    ends = np.cumsum([math.prod(shape) for shape in shapes.values()])
    if not len(ends) or ends[-1] < _LEAST_NUMEL:
        return []
    names = list(shapes)
    found: list[Place] = []
    for number in range(_PIECES):
        position = (2 * number + 1) * int(ends[-1]) // (2 * _PIECES)
        which = int(np.searchsorted(ends, position, "right"))
        shape = shapes[names[which]]
        inside = position - int(ends[which]) + math.prod(shape)
        if not shape:
            found.append((names[which], (...,)))
            continue
        *index, last = map(int, np.unravel_index(inside, shape))
        first = max(0, min(last, shape[-1] - PIECE_NUMEL))
        found.append((names[which], (*index, slice(first, first + PIECE_NUMEL))))
    return found


def squares(before: FlatArray, after: FlatArray) -> tuple[FlatArray, FlatArray, FlatArray]:
    """Returns d^2, x^2 and y^2 of each piece, `(pieces,)`, of samples `(pieces, PIECE_NUMEL)` where they are."""
    difference = after - before
    return (difference * difference).sum(-1), (before * before).sum(-1), (after * after).sum(-1)


def move(step: int, distance: FlatArray, before: FlatArray, after: FlatArray) -> Move:
    """Returns the move that `squares` of a step tell, on the host."""
    squared, x, y = (np.asarray(one, np.float64) for one in (distance, before, after))
    product = (x + y - squared) / 2
    with np.errstate(invalid="ignore", divide="ignore"):
        cosine = np.where(x * y > 0, product * product / (x * y), 0.0)
    return Move(step, np.sqrt(squared), np.sqrt(np.clip(1 - cosine, 0, 1)))


class Verdict(NamedTuple):
    """What became of a shift, or of several."""

    counted: int  # pieces
    put_back: int

    @property
    def is_taken_back(self) -> bool:
        """Whether something other than training has put the weights back."""
        return self.put_back >= max(_LEAST_PIECES, _LEAST_SHARE * self.counted)


def judge_shift(length: NDArray[np.float64], shares: Sequence[NDArray[np.float64]], usual: FlatArray) -> Verdict:
    """Returns what the moves after a shift did to the pieces.

    Args:
        length: (pieces,) |a|; 0 where it did not shift.
        shares: of each move, (pieces,) equation (4).
        usual: (pieces,) the median of the moves' distances.
    """
    with np.errstate(invalid="ignore"):
        counts = (length > 0) & (length >= _LEAST_SHIFT * usual) & np.isfinite(length)
    if len(shares) <= 1:
        return Verdict(int(counts.sum()), 0)
    back = np.array(shares)
    largest = back.argmax(0)
    others = np.sort(back, axis=0)[-2]
    is_put_back = (back.max(0) >= _LEAST_BACK) & (others <= _MOST_BACK) & (largest < len(back) - 1)
    return Verdict(int(counts.sum()), int((counts & is_put_back).sum()))


def find_jump(moves: Sequence[Move], begin: int = 0) -> Jump | None:
    """Returns the first move, of those from `begin` on, that (3) holds for.

    They are in the order of their steps, and none has no length.
    """
    for number in range(begin, len(moves)):
        one = moves[number]
        is_turned = (one.sines >= _LEAST_SINE) & (one.distances > 0)
        if not is_turned.any() or 2 * np.count_nonzero(is_turned) < len(is_turned):
            continue
        others = [*moves[max(0, number - MOVES_BEFORE) : number], *moves[number + 1 : number + 1 + MOVES_AFTER]]
        furthest = np.max([other.distances for other in others], axis=0, initial=0.0)
        has_jumped = is_turned & (one.sines * one.distances >= _LEAST_RATIO * furthest)
        if 2 * np.count_nonzero(has_jumped) >= len(has_jumped):
            return Jump(one.step, is_certain=len(moves) - number > MOVES_AFTER)
    return None
