"""How many inner steps a round stands for.

Learners of different speed and batch bring deltas of different length to one round. With w_m the weight of delta m
(its tokens, `weights`) and s_m its steps, the round's length is the weighted median of the steps, at most H,

    L = min(H, max{s : sum(w_m, s_m >= s) >= sum(w_m) / 2})     (1)

that is, half of the round's tokens came in deltas of L steps or more. Longer deltas are shortened to L steps in the
direction that they took, shorter ones are taken as they are, with as much less weight:

    v_m min(1, L / s_m),    w_m min(1, s_m / L)                 (2)

So a learner that takes many small steps moves the run, and its clock, no faster than those who do most of the work,
and a slow learner does not hold the run back. (`merge` writes (2) for a round of H steps, times H / L, and `outer`
takes it back by the round's share T = rho L / H.)

    L = min(s_m)    after an outage of all, if that is above H  (3)

(3) needs evidence: nearly everybody is in the round, and the run hardly went on without any of them. One learner that
comes back alone with the work of hours moves the run by a round at most.

Source: weights by tokens as in normalised averaging (FedNova, arXiv 2007.07481); the median is this project's, and
docs/learning.md has what it is worth against the mean and the maximum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

# Participation from which a round has nearly everybody: one that died meanwhile is expected for a round or two.
_NEARLY_EVERYBODY: Final = 0.75
# Rounds that the run may have gone on without a learner that was not away alone.
_MOST_MISSED: Final = 0.5


def round_length(
    step_counts: Sequence[int],
    weights: Sequence[float],
    *,
    participation: float,
    missed_step_count: float,
    inner_step_count: int,
) -> float:
    """Returns L in inner steps; 0 for a round without deltas.

    Args:
        step_counts: s, one a delta.
        weights: w, one a delta; if all are 0, deltas count alike.
        participation: rho of the round.
        missed_step_count: the most inner steps by which the run went on beyond the merged work of one of the learners.
        inner_step_count: H.
    """
    shortest = min(step_counts, default=0)
    was_outage = participation >= _NEARLY_EVERYBODY and missed_step_count < _MOST_MISSED * inner_step_count
    if was_outage and shortest > inner_step_count:
        return float(shortest)
    counted = weights if any(weights) else [1.0] * len(weights)
    half, reached = sum(counted) / 2, 0.0
    for step_count, weight in sorted(zip(step_counts, counted, strict=True), reverse=True):
        reached += weight
        if reached >= half:
            return float(min(step_count, inner_step_count))
    return float(min(shortest, inner_step_count))  # what is left of `half` is rounding
