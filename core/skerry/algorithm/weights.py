"""How much each delta of a round counts.

For learner m with n_m tokens in s_m inner steps, whose base is k_m rounds old:

    w_m = n_m min(1, c H / s_m)                            (1)  weight: tokens of more than c H steps do not count
    f_m = (1 + k_m)^-a                                     (2)  staleness
    rho = sum(w_m f_m, contributors) / sum(w_m, working)   (3)  participation, at most 1

A weight is relative: it cannot damp a round whose only delta is stale, nor one that few took part in. So the whole step
is also scaled by rho. A learner that works and is not in the round counts in (3) with what it brought last.

Source: Decoupled DiLoCo (arXiv 2604.21428), section 3. The cap c and rho are this project's; docs/learning.md has what
they are worth.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple


class Contribution(NamedTuple):
    """One delta of a round."""

    weight: float  # w, equation (1)
    damping: float  # f, equation (2)


def delta_weight(token_count: int, step_count: int, *, inner_step_count: int, weight_cap: float) -> float:
    """Returns w of equation (1); 0 for a delta without steps."""
    if step_count <= 0:
        return 0.0
    return token_count * min(1.0, weight_cap * inner_step_count / step_count)


def rounds_behind(steps_since_base: float, *, inner_step_count: int) -> int:
    """Returns k: the rounds of H steps by which the run went on since a delta's base, to the nearest whole one."""
    return math.floor(steps_since_base / inner_step_count + 0.5)


def staleness_damping(rounds: int, *, exponent: float) -> float:
    """Returns f of equation (2)."""
    return float((1 + rounds) ** -exponent)


def participation(contributed: Iterable[Contribution], absent_weights: Iterable[float]) -> float:
    """Returns rho of equation (3); 1 where nothing has any weight."""
    deltas = tuple(contributed)
    brought = math.fsum(delta.weight * delta.damping for delta in deltas)
    total = math.fsum(delta.weight for delta in deltas) + math.fsum(absent_weights)
    return min(1.0, brought / total) if brought > 0 else 1.0
