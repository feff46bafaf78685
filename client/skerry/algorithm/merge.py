"""From the deltas of a round to one outer gradient.

For member m of weight w_m (w' f of `rounds`), with delta v_m of s_m steps, in a round of length L, and each tensor t,

    r_m   = min(1, L / s_m) H / L                          (1)  what takes v_m to a round of H steps
    p_m   = w_m / sum(w)                                   (2)  its share
    c_mt  = p_m r_m                                        (3)  mean
    c_mt  = p_m / |v_mt|                                   (4)  RDA: the direction of v_m
    u_t   = sum(c_mt v_mt, m)                              (5)  computed exactly, in `step`
    d_t   = u_t                                            (6)  mean
    d_t   = sum(p_m r_m |v_mt|, m) * u_t / |u_t|           (7)  RDA: mean length times mean direction

A delta is held against what the other learners did from that point of their own training on: a norm follows the
learner's rate, which rises and falls with the learner's steps, so those that are ahead or behind say nothing by what
they do now. If delta m goes from step a_m - s_m of its learner to a_m, n_jm is the largest norm a step |v_j| / s_j of
the deltas of learner j that ended after step a_m - s_m of its training, or the newest one's where it has not come as
far. R_mt is the upper median of n_jm |v_jt| / |v_j| over the other learners j, with v_j the newest delta of j; and at
least the tensor's share of their whole, by its elements. What is longer than kappa times that counts less:

    x_mt  = min(1, L / s_m) |v_mt| / (L R_mt)              (8)  how many times what its peers did
    a_mt  = min(1, kappa / x_mt)^2                         (9)  multiplies c_mt in (3) and (4), and r_m in (7)

So no delta counts for more than kappa times a usual one, and a delta of 29 times the usual norm counts for kappa^2 / 29
of a usual one.

RDA is radial-directional averaging: where deltas disagree, the mean is shorter than they are, and RDA is not. A delta
without length has no direction, and directions that cancel give d = 0. The norms are taken in float64.

Source: Decoupled DiLoCo (arXiv 2604.21428), section 3.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from skerry.wire.policy import MergeRule

# Unit directions whose weighted sum is shorter than this cancelled down to float32 rounding: it has no direction.
_CANCELLED: Final = 2.0**-20
# A norm below this counts as zero, so that its inverse, and what it scales, stay normal float32 numbers.
_SMALLEST_NORM: Final = 2.0**-100
_SMALLEST_NORMAL: Final = float(np.finfo(np.float32).smallest_normal)
# kappa. In runs of equal learners no delta has a ratio x above 1.7.
_LARGEST_RATIO: Final = 2.0

# A pair then spans a tenth of a long training or less.
_PACE_LENGTH: Final = 32

Pace: TypeAlias = tuple[tuple[int, float], ...]
"""What n follows from: in the order of a learner's steps, the last step of a delta and |v| / s. In a long training each
pair stands for several deltas, with the last step and the largest norm of them."""


def with_step(pace: Pace, last_step: int, norm_a_step: float) -> Pace:
    """Returns the pace with one more delta; the two neighbours that span the fewest steps become one if it is full."""
    pairs = sorted((*pace, (last_step, norm_a_step)))
    if len(pairs) > _PACE_LENGTH:
        ends = [0, *(end for end, _ in pairs)]
        shortest = min(range(_PACE_LENGTH), key=lambda index: ends[index + 2] - ends[index])
        (_, first), (end, second) = pairs[shortest : shortest + 2]
        pairs[shortest : shortest + 2] = [(end, max(first, second))]
    return tuple(pairs)


def largest_after(pace: Pace, step: int) -> float:
    """Returns n: the largest norm a step of the deltas that ended after `step`, or of the newest where none did."""
    index = min(bisect_right(pace, (step, math.inf)), len(pace) - 1)
    return max(norm for _, norm in pace[index:])


def reference_norms(
    peers: NDArray[np.float64],  # (learners, tensors) n_jm |v_jt| / |v_j|
    sizes: NDArray[np.float64],  # (tensors,) elements
) -> NDArray[np.float64]:
    """Returns R of equation (8), (tensors,); infinite where there is nothing to compare with."""
    medians = np.sort(peers, axis=0)[len(peers) // 2] if len(peers) else np.zeros(len(sizes))
    whole = math.hypot(*medians)
    if whole == 0:
        return np.full(len(sizes), np.inf)
    references: NDArray[np.float64] = np.maximum(medians, whole * np.sqrt(sizes / sizes.sum()))
    return references


@dataclass(frozen=True)
class Round:
    """What the log says of a round's deltas."""

    rule: MergeRule
    weights: NDArray[np.float64]  # (members,) w, at least 0
    norms: NDArray[np.float64]  # (members, tensors) |v_mt|
    step_counts: NDArray[np.float64]  # (members,) s
    length: float  # L
    inner_step_count: int  # H
    references: NDArray[np.float64]  # (members, tensors) R; infinite: nothing to compare with

    def coefficients(self) -> NDArray[np.float32]:
        """Returns c of equation (3) or (4), (members, tensors). Members whose weights are all zero count alike."""
        shares = self.shares()[:, None]
        if self.rule is MergeRule.MEAN:
            return _float32(shares * self._ratios())
        is_zero = self.norms < _SMALLEST_NORM
        return _float32(np.where(is_zero, 0.0, shares / np.where(is_zero, 1.0, self.norms)) * self._trust())

    def tensor_scales(self, sum_norms: NDArray[np.float64]) -> NDArray[np.float32]:
        """Returns what takes u to d, (tensors,): equation (7) from the norms |u_t|; 0 where directions cancel."""
        if self.rule is MergeRule.MEAN:
            return np.ones(self.norms.shape[1], np.float32)
        is_zero = sum_norms < _CANCELLED
        lengths = self.shares() @ (self.norms * self._ratios())
        return _float32(np.where(is_zero, 0.0, lengths / np.where(is_zero, 1.0, sum_norms)))

    def shares(self) -> NDArray[np.float64]:
        """Returns p of equation (2), (members,)."""
        total = math.fsum(self.weights)
        return self.weights / total if total > 0 else np.full(len(self.weights), 1 / len(self.weights))

    def _shortened(self) -> NDArray[np.float64]:
        """Returns min(1, L / s), (members, 1)."""
        return np.minimum(1.0, self.length / np.maximum(self.step_counts, 1.0))[:, None]

    def _ratios(self) -> NDArray[np.float64]:
        """Returns a r of equations (1) and (9), (members, tensors)."""
        return self._shortened() * (self.inner_step_count / self.length) * self._trust()

    def _trust(self) -> NDArray[np.float64]:
        """Returns a of equation (9), (members, tensors)."""
        taken, most = self._shortened() * self.norms, _LARGEST_RATIO * self.length * self.references
        return np.divide(most, taken, out=np.ones_like(taken), where=taken > most) ** 2


def _float32(values: NDArray[np.float64]) -> NDArray[np.float32]:
    """Rounds to float32; what would be subnormal, where machines disagree, becomes zero."""
    return np.where(np.abs(values) < _SMALLEST_NORMAL, 0.0, values).astype(np.float32)
