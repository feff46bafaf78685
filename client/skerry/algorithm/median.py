"""The geometric median of directions: a merge that a minority of the learners can't turn.

With e_mt = v_mt / |v_mt| the direction of member m in tensor t, G_t their inner products, p_m the members' shares and
n_t the tensor's elements,

    A_m     = sum(n_t p_j G_t[m, j], j != m, all t)                                  (1)  agreement with the others
    d_mt^2  = |e_mt - z_t|^2 = 1 - 2 (G_t q_t)_m + q_t G_t q_t,   z_t = sum(q_mt e_mt, m)    (2)
    q_mt    = (p_m / d_mt) / sum(p_j / d_jt, j),   again and again from q = p         (3)  Weiszfeld's steps

A member with A_m < 0 undoes what the others do and has no share; the one that disagrees most goes first, since it makes
others seem to disagree. z then comes to the point with the least sum(p_m |e_mt - z|). The q replace the shares of
`merge`, equations (4) and (7), where no learner weighs more than the median one. All that is read of the deltas is G.

Source: Pillutla, Kakade, Harchaoui, Robust Aggregation for Federated Learning (arXiv 1912.13445), smoothed Weiszfeld.
Taking the median of directions, and equation (1), are this project's.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

Float64s = NDArray[np.float64]

_STEP_COUNT: Final = 8
# Lower bound of the distances, so that a member that lies at the median does not get the whole weight.
_SMALLEST_DISTANCE: Final = 1e-3


def add_products(
    products: Float64s,  # (tensors, members, members) changed
    rows: NDArray[np.float32],  # (members, elements) of one range
    tensor: int,
) -> None:
    """Adds the inner products of the members' elements of one tensor; slow enough for a worker thread."""
    exact = rows.astype(np.float64)
    products[tensor] += exact @ exact.T


def median_shares(
    shares: Float64s,  # (members,) p, sum 1
    products: Float64s,  # (tensors, members, members) <v_jt, v_kt>
    sizes: Float64s,  # (tensors,) elements
) -> Float64s:
    """Returns q of equation (3), (members, tensors); columns have sum 1."""
    norms = np.sqrt(np.maximum(np.einsum("tmm->tm", products), 0.0))
    inverse = np.divide(1.0, norms, out=np.zeros_like(norms), where=norms > 0)
    cosines = products * inverse[:, :, None] * inverse[:, None, :]
    shares = _agreeing(np.minimum(shares, np.median(shares)), cosines, sizes)
    found = np.repeat(shares[None, :], len(sizes), axis=0)  # (tensors, members)
    for _ in range(_STEP_COUNT):
        to_mean = np.einsum("tmk,tk->tm", cosines, found)
        squares = np.einsum("tmm->tm", cosines) - 2 * to_mean + np.sum(to_mean * found, axis=1, keepdims=True)
        pulls = shares / np.sqrt(np.maximum(squares, _SMALLEST_DISTANCE**2))
        found = pulls / pulls.sum(axis=1, keepdims=True)
    return found.T


def _agreeing(shares: Float64s, cosines: Float64s, sizes: Float64s) -> Float64s:
    """Returns the shares, sum 1, without those of members that disagree by equation (1)."""
    whole = np.einsum("tmk,t->mk", cosines, sizes)
    np.fill_diagonal(whole, 0.0)
    kept = shares.copy()
    while True:
        agreement = np.where(kept > 0, whole @ kept, np.inf)
        worst = int(np.argmin(agreement))
        # With two that disagree it is impossible to tell which one lies.
        if agreement[worst] >= 0 or np.count_nonzero(kept) < 3:
            found: Float64s = kept / kept.sum()
            return found
        kept[worst] = 0.0
