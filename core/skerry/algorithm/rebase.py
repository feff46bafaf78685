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
that rounding is no work. There A is replaced in (1) to (4) by a base B, which takes the rounding in:

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

# A flat float32 vector where the parameters live: a NumPy array or a torch tensor. Only + and - are used here.
FlatArray = Any


class Trained(NamedTuple):
    """How far a learner has trained: counts since its process started."""

    step_count: int
    token_count: int


UNTRAINED: Final = Trained(0, 0)


@dataclass(frozen=True)
class DeltaInFlight:
    """A delta whose fate is not final. It covers the steps (begin.step_count, end.step_count]."""

    delta_id: str
    base_version: int
    begin: Trained
    end: Trained
    decoded: FlatArray | None  # (numel,) q; None once a replacement has taken its work out of the model


@dataclass(frozen=True)
class Ledger:
    """The account of one fragment; a value: every event gives the next one.

    `anchor` is the global weights exactly, on the host; `base` may be the same array. Neither is ever written to.
    """

    version: int
    digest: bytes
    anchor: NDArray[np.float32]  # (numel,)
    base: FlatArray  # (numel,)
    sent_until: Trained = UNTRAINED  # work up to here is in deltas, or was dropped by a replacement
    delta: DeltaInFlight | None = None

    def unsent(self, weights: FlatArray) -> FlatArray:
        """Returns u, `(numel,)`, for the model's weights as they were copied."""
        unsent = self.base - weights
        if self.delta is not None and self.delta.decoded is not None:
            unsent -= self.delta.decoded
        return unsent

    def sent(self, delta_id: str, decoded: FlatArray, now: Trained) -> Ledger:
        """Returns the account with a delta in flight that holds the work up to `now`."""
        assert self.delta is None  # one at a time: so steps stay in one piece whatever its fate
        delta = DeltaInFlight(delta_id, self.version, self.sent_until, now, decoded)
        return replace(self, delta=delta, sent_until=now)

    def returned(self) -> Ledger:
        """Returns the account after the delta was refused or expired: its work is unsent again."""
        assert self.delta is not None
        is_in_model = self.delta.decoded is not None
        return replace(self, delta=None, sent_until=self.delta.begin if is_in_model else self.sent_until)

    def shift(self, anchor: FlatArray, *, is_merged: bool) -> FlatArray:
        """Returns theta' - theta, `(numel,)`: equation (4) where the delta in flight is in `anchor`, else (3)."""
        shift = anchor - self.base
        if is_merged and self.delta is not None and self.delta.decoded is not None:
            shift += self.delta.decoded
        return shift

    def rounded_base(self, before: FlatArray, after: FlatArray, *, is_merged: bool) -> FlatArray:
        """Returns B', equation (6) or (5): `before` and `after` are theta and theta' as the model holds them."""
        base = self.base + (after - before)
        if is_merged and self.delta is not None and self.delta.decoded is not None:
            base -= self.delta.decoded
        return base

    def rebased(
        self, version: int, digest: bytes, anchor: NDArray[np.float32], base: FlatArray, *, is_merged: bool
    ) -> Ledger:
        """Returns the account after the shift was added to the weights; `base` is `anchor`, or B' where they round."""
        delta = None if is_merged else self.delta
        return replace(self, version=version, digest=digest, anchor=anchor, base=base, delta=delta)

    def replaced(
        self, version: int, digest: bytes, anchor: NDArray[np.float32], base: FlatArray, now: Trained, *, is_over: bool
    ) -> Ledger:
        """Returns the account after the weights became `base`: local work that was not merged is out of the model.

        A delta whose fate is not over stays in flight, by its id only.
        """
        delta = None if is_over or self.delta is None else replace(self.delta, decoded=None)
        return Ledger(version, digest, anchor, base, now, delta)
