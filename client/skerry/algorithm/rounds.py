"""How much each delta of a round counts, and how many inner steps and tokens the round stands for.

For delta m with n_m tokens in s_m inner steps of learner l, whose base is k_m rounds old, and with W_j the larger of
what learner j brings now and what it brought last:

    w_m   = n_m min(1, 2 H / s_m)                                               (1)  weight
    w_m   = median(W_j, j != l)   if it is above 100 times that                 (2)  doubt
    f_m   = (1 + k_m)^-0.5                                                      (3)  staleness
    L     = min(H, max{s : sum(w_m f_m, s_m >= s) >= sum(w_m f_m) / 2})         (4)  length of the round
    R_l   = S - S_l + L sum(w_m f_m, contributors) / sum(w_m, working)          (5)  the run's steps meanwhile
    w'_m  = w_m min(1, s_l / R_l)                                               (6)  weight of a slow learner
    rho   = sum(w'_m f_m, contributors) / sum(w'_m, working)                    (7)  participation, at most 1
    L     = max{s : sum(w'_m f_m, s_m >= s, l kept up) >= 3/4 sum(w'_m, working)}   (8)  if that is above H

(1) Tokens of more than 2 H steps do not count. (2) A learner that reports 1000 times its tokens does not dominate a
round in which two others work; with fewer others nobody is doubted. (4) is the weighted median of the steps: half of
the round's weight came in deltas of L steps or more. Longer deltas are shortened to L steps in the direction that they
took (`merge`), shorter ones are taken as they are. So a learner that takes many small steps moves the run no faster
than those who do most of the work.

By (6) a slow learner does not hold the run back. The run is at S inner steps; it was at S_l when the learner last
brought a delta, or attached if that was later. What took the s_l steps of its deltas of this round while the run went
on by R_l went less far than the run did. A learner that paused counts as slow once.

A weight is relative: it cannot damp a round whose only delta is stale, nor one that few took part in. So the whole step
is also scaled by rho. A learner that works and is not in the round counts in (5) and (7) with the w' that it had last.

(8) is for the time after an outage of all: three quarters of the weight that works comes in deltas of L steps or more,
each of a learner that kept up, which is one without which the run went on by less than H / 2. One learner that comes
back with the work of hours moves the run by a round at most.

Source: Decoupled DiLoCo (arXiv 2604.21428), section 3, and weights by tokens as in normalised averaging (FedNova, arXiv
2007.07481). (2), (4) to (6) and rho are this project's.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

# Of the weight that works, after an outage of all: a learner that died is still expected for a round or two.
_NEARLY_EVERYBODY: Final = 0.75
# Of the others' median: more than any learner trains on while the others bring a delta.
_MOST_BELIEVED: Final = 100.0
# Rounds of H steps whose tokens count in one delta.
_MOST_ROUNDS: Final = 2.0
# Rounds that a run goes on before a learner that brings nothing no longer counts as working.
ABSENT_AFTER_ROUNDS: Final = 1.5
# Rounds by which the run may have gone on without a learner that kept up.
_MOST_MISSED: Final = 0.5


class Contribution(NamedTuple):
    """One delta of a round."""

    weight: float  # w or w', equations (1), (2) and (6)
    damping: float  # f, equation (3)


def delta_weight(token_count: int, step_count: int, *, inner_step_count: int) -> float:
    """Returns w of equation (1); 0 for a delta without steps."""
    if step_count <= 0:
        return 0.0
    return token_count * min(1.0, _MOST_ROUNDS * inner_step_count / step_count)


def believed_bounds(brought: Mapping[str, float]) -> dict[str, float]:
    """Returns what each learner counts for at most, equation (2), from W by learner; infinite: it is believed."""
    order, other_count = sorted(brought.values()), len(brought) - 1
    bounds = dict.fromkeys(brought, math.inf)
    if other_count < 2:
        return bounds
    for name, own in brought.items():
        skipped = bisect_left(order, own)  # left out of the median
        low, high = (order[index + (index >= skipped)] for index in ((other_count - 1) // 2, other_count // 2))
        median = (low + high) / 2
        if own > _MOST_BELIEVED * median:
            bounds[name] = median
    return bounds


def rounds_behind(steps_since_base: float, *, inner_step_count: int) -> int:
    """Returns k: the rounds of H steps by which the run went on since a delta's base, to the nearest whole one."""
    return math.floor(steps_since_base / inner_step_count + 0.5)


def staleness_damping(rounds: int) -> float:
    """Returns f of equation (3)."""
    return float((1 + rounds) ** -0.5)


def relative_speed(step_count: int, run_steps: float) -> float:
    """Returns what takes w to w' in equation (6), from s and R."""
    return min(1.0, step_count / run_steps) if run_steps > 0 else 1.0


def participation(contributed: Iterable[Contribution], absent_weights: Iterable[float]) -> float:
    """Returns rho of equation (7); 1 where nothing has any weight."""
    deltas = tuple(contributed)
    brought = math.fsum(delta.weight * delta.damping for delta in deltas)
    total = math.fsum(delta.weight for delta in deltas) + math.fsum(absent_weights)
    return min(1.0, brought / total) if brought > 0 else 1.0


def round_length(step_counts: Sequence[int], weights: Sequence[float], *, inner_step_count: int) -> float:
    """Returns L of equation (4) in inner steps; 0 for a round without deltas.

    Args:
        step_counts: s, one a delta.
        weights: w f, one a delta; if all are 0, deltas count alike.
        inner_step_count: H.
    """
    shortest = min(step_counts, default=0)
    counted = weights if any(weights) else [1.0] * len(weights)
    half, reached = sum(counted) / 2, 0.0
    for step_count, weight in sorted(zip(step_counts, counted, strict=True), reverse=True):
        reached += weight
        if reached >= half:
            return float(min(step_count, inner_step_count))
    return float(min(shortest, inner_step_count))  # what is left of `half` is rounding


def outage_length(
    step_counts: Sequence[int],
    weights: Sequence[float],
    missed_step_counts: Sequence[float],
    *,
    working_weight: float,
    inner_step_count: int,
) -> float | None:
    """Returns L of equation (8) after an outage of all; None if there was none.

    Args:
        step_counts: s, one a delta.
        weights: w' f, one a delta.
        missed_step_counts: inner steps by which the run went on beyond the merged work of its learner, one a delta.
        working_weight: the sum of w' of all working learners.
        inner_step_count: H.
    """
    reached = 0.0
    for step_count, weight, missed in sorted(zip(step_counts, weights, missed_step_counts, strict=True), reverse=True):
        if step_count <= inner_step_count:
            return None
        if missed < _MOST_MISSED * inner_step_count:
            reached += weight
        if reached >= _NEARLY_EVERYBODY * working_weight:
            return float(step_count)
    return None
