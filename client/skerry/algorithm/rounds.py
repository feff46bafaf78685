"""How much each delta of a round counts, and how many inner steps and tokens the round stands for.

For delta m with n_m tokens in s_m inner steps of learner l, whose base is k_m rounds old, and with W_j the larger of
what learner j brings now and what it brought last:

    w_m   = n_m min(1, c H / s_m)                                               (1)  weight
    f_m   = (1 + k_m)^-0.5                                                      (2)  staleness
    L     = min(H, max{s : sum(w_m f_m, s_m >= s) >= sum(w_m f_m) / 2})         (3)  length of the round
    w'_m  = w_m min(1, s_m / L)                                                 (4)  weight of a shorter delta
    sum(w_m, m of l) <= c median(W_j, j != l),  if there are two others         (5)  cap
    rho   = sum(w'_m f_m, contributors) / sum(w'_m, working)                    (6)  participation, at most 1
    L     = min(s_m)  after an outage of all, if that is above H                (7)
    p_m   = n_m, or median(W_j, j != l) if n_m is above 100 times that          (8)  tokens for the run's plan

(1) Tokens of more than c H steps do not count. (3) is the weighted median of the steps: half of the round's weight came
in deltas of L steps or more. Longer deltas are shortened to L steps in the direction that they took (`merge`), shorter
ones are taken as they are, with less weight. So a learner that takes many small steps moves the run no faster than
those who do most of the work, and a slow learner does not hold the run back. By (5) wrong token counts cannot dominate
a round.

A weight is relative: it cannot damp a round whose only delta is stale, nor one that few took part in. So the whole step
is also scaled by rho. A learner that works and is not in the round counts in (6) with what it brought last.

(7) needs evidence: nearly all learners are in the round, and the run hardly went on without any of them. One learner
that comes back alone with the work of hours moves the run by a round at most.

(8) says by how many of its planned tokens a delta takes the run on (`outer`). A large learner's count in full there,
although (5) caps its weight. Of one that reports 1000 times its tokens, one delta would be the end of the plan.

Source: Decoupled DiLoCo (arXiv 2604.21428), section 3, and weights by tokens as in normalised averaging (FedNova, arXiv
2007.07481). The cap c, rho and the median are this project's.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

# Participation from which nearly all learners are in a round: one that died is still expected for a round or two.
_NEARLY_EVERYBODY: Final = 0.75
# Of the others' median: more tokens than no learner trains on in a round that others take part in.
_MOST_TOKENS: Final = 100
# Rounds by which the run may have gone on without a learner for its absence to count as an outage of all.
_MOST_MISSED: Final = 0.5


class Contribution(NamedTuple):
    """One delta of a round."""

    weight: float  # w', equation (4)
    damping: float  # f, equation (2)


def delta_weight(token_count: int, step_count: int, *, inner_step_count: int, weight_cap: float) -> float:
    """Returns w of equation (1); 0 for a delta without steps."""
    if step_count <= 0:
        return 0.0
    return token_count * min(1.0, weight_cap * inner_step_count / step_count)


def weight_bounds(brought: Mapping[str, float], *, weight_cap: float) -> dict[str, float]:
    """Returns the right side of equation (5) by learner, from W by learner; infinite with fewer than two others."""
    order, other_count = sorted(brought.values()), len(brought) - 1
    if other_count < 2:
        return dict.fromkeys(brought, math.inf)
    bounds = {}
    for name, own in brought.items():
        skipped = bisect_left(order, own)  # left out of the median
        low, high = (order[index + (index >= skipped)] for index in ((other_count - 1) // 2, other_count // 2))
        bounds[name] = weight_cap * ((low + high) / 2)
    return bounds


def rounds_behind(steps_since_base: float, *, inner_step_count: int) -> int:
    """Returns k: the rounds of H steps by which the run went on since a delta's base, to the nearest whole one."""
    return math.floor(steps_since_base / inner_step_count + 0.5)


def staleness_damping(rounds: int) -> float:
    """Returns f of equation (2)."""
    return float((1 + rounds) ** -0.5)


def share_of_length(weight: float, step_count: int, length: float) -> float:
    """Returns w' of equation (4)."""
    return weight * min(1.0, step_count / length) if length > 0 else weight


def participation(contributed: Iterable[Contribution], absent_weights: Iterable[float]) -> float:
    """Returns rho of equation (6); 1 where nothing has any weight."""
    deltas = tuple(contributed)
    brought = math.fsum(delta.weight * delta.damping for delta in deltas)
    total = math.fsum(delta.weight for delta in deltas) + math.fsum(absent_weights)
    return min(1.0, brought / total) if brought > 0 else 1.0


def round_length(step_counts: Sequence[int], weights: Sequence[float], *, inner_step_count: int) -> float:
    """Returns L of equation (3) in inner steps; 0 for a round without deltas.

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


def planned_tokens(deltas: Iterable[tuple[str, int]], brought: Mapping[str, float]) -> float:
    """Returns the sum of equation (8), from the learner and the tokens of each delta, and W by learner."""
    medians = weight_bounds(brought, weight_cap=1.0)
    return sum(n if n <= _MOST_TOKENS * medians[learner] else medians[learner] for learner, n in deltas)


def outage_length(
    step_counts: Sequence[int], *, participation: float, missed_step_count: float, inner_step_count: int
) -> float | None:
    """Returns L of equation (7) after an outage of all; None if there was none.

    Args:
        step_counts: s, one a delta.
        participation: rho of the round, equation (6).
        missed_step_count: the most inner steps by which the run went on beyond the merged work of one of the learners.
        inner_step_count: H.
    """
    was_outage = participation >= _NEARLY_EVERYBODY and missed_step_count < _MOST_MISSED * inner_step_count
    shortest = min(step_counts, default=0)
    return float(shortest) if was_outage and shortest > inner_step_count else None
