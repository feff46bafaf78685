"""Rebase: a learner adopts new global weights and keeps the work that the syncer does not have yet.

For one fragment of one learner,

    theta = A - q - u                                   (1)  at every moment
    u = A - q - theta                                   (2)  what the next delta holds, before it is encoded
    theta' = theta + (A' - A)                           (3)  adopting A', while q is in flight or there is none
    theta' = theta + (A' - A) + q                       (4)  adopting A', which holds q

    theta  the weights in the model
    A      the global weights that were adopted last (the anchor)
    q      the delta in flight, as its receiver decodes it; 0 where there is none
    u      the work that is in no delta

u is never stored: (2) gives it. So what the quantiser drops stays in u (error feedback without a buffer), a delta that
is refused or expires returns to u when q is forgotten, and (3) and (4) leave u as it is.

In float32 the rounding of (3) and (4) becomes part of u. A model that holds bfloat16 or float16 rounds much more, and
that rounding must not be sent as work. There A is replaced in (1) to (4) by a base B, which takes the rounding in:

    B' = B + (theta' - theta)                           (5)  in place of (3)
    B' = B + (theta' - theta) - q                       (6)  in place of (4)

Source: (3) and (4) are those of re-implementations of Decoupled DiLoCo (arXiv 2604.21428). Keeping u implicit, and
equations (5) and (6), are Skerry's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from skerry.wire.kernels import kernels_for

# A flat float32 vector where the parameters are: a NumPy array or a torch tensor. Only + and - are used here.
FlatArray = Any


class Trained(NamedTuple):
    """How far a learner has trained: counts since its process started."""

    step_count: int
    token_count: int


UNTRAINED: Final = Trained(0, 0)


@dataclass(frozen=True)
class Ledger:
    """A, B, q and the steps that they cover, for one fragment; a value: every event gives the next one.

    `anchor` and `base` may be one array. No array of it is ever written to.
    """

    version: int
    digest: bytes
    anchor: NDArray[np.float32]  # (numel,) A, on the host
    base: FlatArray  # (numel,) B; A itself where the model holds float32
    sent_until: Trained = UNTRAINED  # work up to here is in deltas, or was dropped as the weights were set back
    in_flight: FlatArray | None = None  # (numel,) q
    in_flight_since: Trained = UNTRAINED  # q holds the steps after this, up to `sent_until`

    def sent(self, decoded: FlatArray, now: Trained) -> Ledger:
        """Returns the ledger with `decoded`, `(numel,)`, in flight, which holds the work up to `now`."""
        assert (
            self.in_flight is None
        )  # one at a time: so the steps of a delta are consecutive whatever became of others
        return replace(self, in_flight=decoded, in_flight_since=self.sent_until, sent_until=now)

    def returned(self) -> Ledger:
        """Returns the ledger after the delta was refused or expired: its work is unsent again.

        Where the weights were set back since, the work is out of the model, and nothing returns.
        """
        return self if self.in_flight is None else replace(self, in_flight=None, sent_until=self.in_flight_since)

    def shift(self, anchor: FlatArray, *, is_merged: bool, out: NDArray[np.float32] | None = None) -> FlatArray:
        """Returns theta' - theta, `(numel,)`: equation (4) where the delta in flight is in `anchor`, else (3).

        It is written to `out`, where that is given.
        """
        if out is not None and is_merged and self.in_flight is not None:
            kernels = kernels_for(out, anchor, self.base, self.in_flight)
            if kernels is not None:
                kernels.shift(anchor, self.base, self.in_flight, out)
                return out
        shift = anchor - self.base if out is None else np.subtract(anchor, self.base, out=out)
        if is_merged and self.in_flight is not None:
            shift += self.in_flight
        return shift

    def rounded_base(self, before: FlatArray, after: FlatArray, *, is_merged: bool) -> FlatArray:
        """Returns B', equation (6) or (5): `before` and `after` are theta and theta' as the model holds them."""
        base = self.base + (after - before)
        if is_merged and self.in_flight is not None:
            base -= self.in_flight
        return base

    def rebased(
        self, version: int, digest: bytes, anchor: NDArray[np.float32], base: FlatArray, *, is_merged: bool
    ) -> Ledger:
        """Returns the ledger after the shift was added to the weights; `base` is `anchor`, or B' where they round."""
        in_flight = None if is_merged else self.in_flight
        return replace(self, version=version, digest=digest, anchor=anchor, base=base, in_flight=in_flight)

    def restored(self, base: FlatArray, now: Trained) -> Ledger:
        """Returns the ledger after A was loaded as `base`, rounded or not: what was not merged is out of the model."""
        return Ledger(self.version, self.digest, self.anchor, base, sent_until=now)
