"""When a learner sends a delta of a fragment: by its own inner steps, never by the clock, and only what it has trained.

With t the learner's steps, c its steps at the last accepted delta, o those at which the last round opened, S the run's
steps, and r the moving average of the steps that the learner takes while the run goes on by a round of H,

    c_p = floor(p H / P)                               (1)  at the start, for fragment p of P
    t - c >= H                                         (2)  a delta is due
    r <- r + 0.3 (H (t - t') / (S - S') - r)           (3)  when a round opens, from the third on, S' at t' being the
                                                            last measurement
    r < 0.75 H  and  r - 1 <= t - o <= 2 max(r, 1)     (4)  the next round is near

(4) is for slow learners. In their own steps the run goes on by H more often than every H, so (2) would make them late:
they are in the middle of a long step when a round opens, and the others wait for their delta or close the round without
it. They send just before the round instead. A delta of fewer than H steps opens no round, so being early costs only the
work of the steps that follow. It is the run's steps that tell who is slow: rounds may open more often than that because
somebody's deltas come late, and then they are short. A learner's first two rounds tell nothing: while its fragments
begin, the run's progress lags behind it, or catches up.

A delta is work only if nothing but training has moved the weights. That is told by a sample before and after each
step's training: up to 64 pieces of the model, spread evenly over its elements, each of up to 64 elements in a row. Of a
piece that was x and is y,

    d = |y - x|                                        (5)  how far it moved
    s = sqrt(1 - (x y)^2 / (x^2 y^2))                  (6)  sine of the angle between; 1 where x or y is 0

and a step replaced the weights if at least half of the pieces have

    s >= 0.3  and  s d >= 16 max(d', of the 32 moves before and the 4 after)          (7)

Training moves weights alike in steps that are near to each other, however far it moves them: a learning rate that rises
stays high in the steps that follow, so the move before them is no larger than theirs. Moves of no length, as where
gradients are accumulated, do not count. Weights that are only scaled keep their direction, so (6) leaves them out. (7)
is decided once there are 4 moves after the step.

Source: Decoupled DiLoCo (arXiv 2604.21428) for H and for spreading the fragments over it; the rest is Skerry's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from skerry.algorithm.rebase import FlatArray

# Of H. A learner for which the run goes on faster than this never opens a round.
_SLOW_SHARE: Final = 0.75
# Weight of what the last round took in the moving average.
_RHYTHM_FACTOR: Final = 0.3
# Openings of a learner's first rounds, from which nothing is measured.
_UNMEASURED_COUNT: Final = 2
# Own steps by which a slow learner is early.
_LEAD_STEPS: Final = 1.0

PIECE_NUMEL: Final = 64
"""Elements of a piece at most."""
MOVES_BEFORE: Final = 32
"""Moves before a step with which it is compared, at most."""
MOVES_AFTER: Final = 4
"""Moves after a step with which it is compared."""
_PIECES: Final = 64
# In smaller models some kinds of training find the solution in one step.
_LEAST_NUMEL: Final = 1024
# What training reaches, and what other weights in their place do: docs/learning.md has the table.
_LEAST_SINE: Final = 0.3
_LEAST_RATIO: Final = 16.0

Place: TypeAlias = tuple[str, tuple[Any, ...]]
"""A piece: the name of its tensor, and the index that gives it."""


def first_contributions(fragment_count: int, inner_step_count: int) -> tuple[int, ...]:
    """Returns c_p of equation (1) for each fragment, so that about fragment_count / H fragments move a step.

    The first delta of a fragment thus holds H to nearly 2 H steps. Later rounds keep the spread by themselves.
    """
    return tuple(number * inner_step_count // fragment_count for number in range(fragment_count))


def is_due(step_count: int, *, contributed_step: int, inner_step_count: int) -> bool:
    """Whether a delta is due, equation (2); adopting a version does not restart the count."""
    return step_count - contributed_step >= inner_step_count


@dataclass
class RoundRhythm:
    """How many steps a learner takes while the run goes on by H, and when the last round of a fragment opened."""

    # t' and S'; S is the mean over fragments, as last reported.
    measured_step: int = 0
    measured_run_step: float = 0.0
    opened_count: int = 0
    opened_step: int | None = None  # o
    interval: float | None = None  # r

    def opened(self, step_count: int, run_step_count: float, *, inner_step_count: int) -> None:
        """Takes note that a round opened at these steps of the learner and of the run, equation (3)."""
        self.opened_step = step_count
        self.opened_count += 1
        run_steps = run_step_count - self.measured_run_step
        if run_steps > 0 and self.opened_count > _UNMEASURED_COUNT:
            taken = inner_step_count * (step_count - self.measured_step) / run_steps
            self.interval = taken if self.interval is None else self.interval + _RHYTHM_FACTOR * (taken - self.interval)
        # It stands still where a round was void or its version is not reported yet.
        if run_steps != 0 or self.opened_count <= _UNMEASURED_COUNT:
            self.measured_step, self.measured_run_step = step_count, run_step_count

    def is_near(self, step_count: int, *, inner_step_count: int) -> bool:
        """Whether the next round is near, equation (4)."""
        if self.opened_step is None or self.interval is None or self.interval >= _SLOW_SHARE * inner_step_count:
            return False
        return self.interval - _LEAD_STEPS <= step_count - self.opened_step <= 2 * max(self.interval, 1.0)


class Move(NamedTuple):
    """What one step did to each piece."""

    step: int
    distances: NDArray[np.float64]  # (pieces,) equation (5)
    sines: NDArray[np.float64]  # (pieces,) equation (6)


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


def find_jump(moves: Sequence[Move], begin: int = 0) -> Jump | None:
    """Returns the first move, of those from `begin` on, that (7) holds for.

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
