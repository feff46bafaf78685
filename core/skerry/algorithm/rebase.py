"""The account of one fragment's local work: what is sent, what is not, exactly, whatever becomes of deltas.

At every moment, for the weights theta that are in the model,

    theta = base - q - u,    base = A - s m

with A the global weights that were adopted, q the delta in flight as its receiver decodes it (0 where there is none), u
what is unsent. u is never stored: it is what the equation leaves. So what the quantiser drops stays in u by itself, a
refused delta returns to u by forgetting q, and adoption adds the same `shift` to theta and to the right-hand side:

    A'    the newly adopted global weights
    shift = base' - base              the delta is still in flight (or there is none)
    shift = base' - base + q          the delta was merged into A' or a version before it: it leaves the account
    theta' = theta + shift,  base' = A' - s' m'

m is the delta that was merged last, and stands in for others' deltas of the same round while they are still to come, or
until the next of its own is merged: s is 0 where all were merged together, and m then not kept. Merged alone as one of
four, a delta moves A by a quarter; without the stand-in the learner would fall back by three quarters of what it has
learned, to learn them again, and have them twice once the others' deltas, which bring the same, are in.

In float32 the rounding of theta + shift becomes part of u. Where the model rounds more coarsely (bfloat16), that
rounding is nobody's work, so base' is corrected by it: base' = base + (theta' - theta) - q.

Source: algorithm of rebase in Decoupled DiLoCo re-implementations; the ledger form is this project's.
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
    merged: DeltaInFlight | None = None  # whose decoded is m, while it stands in for others'

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

    def merged_last(self, *, is_merged: bool) -> DeltaInFlight | None:
        """Returns whose decoded is m': the delta in flight if that is merged now, else what has stood in so far."""
        if is_merged and self.delta is not None and self.delta.decoded is not None:
            return self.delta
        return self.merged

    def shift_to(self, base: FlatArray, *, is_merged: bool) -> FlatArray:
        """Returns what adopting adds to the weights, `(numel,)`, where it makes `base` of the base."""
        shift = base - self.base
        if is_merged and self.delta is not None and self.delta.decoded is not None:
            shift += self.delta.decoded
        return shift

    def corrected_base(self, before: FlatArray, after: FlatArray, *, is_merged: bool) -> FlatArray:
        """Returns base' for weights that round: `before` and `after` are theta around the addition of the shift."""
        base = self.base + (after - before)
        if is_merged and self.delta is not None and self.delta.decoded is not None:
            base -= self.delta.decoded
        return base

    def rebased(
        self,
        version: int,
        digest: bytes,
        anchor: NDArray[np.float32],
        base: FlatArray,
        *,
        is_merged: bool,
        merged: DeltaInFlight | None = None,
    ) -> Ledger:
        """Returns the account after the shift was added to the weights; `merged` has m' where it stands in."""
        delta = None if is_merged else self.delta
        return replace(self, version=version, digest=digest, anchor=anchor, base=base, delta=delta, merged=merged)

    def replaced(
        self, version: int, digest: bytes, anchor: NDArray[np.float32], base: FlatArray, now: Trained, *, is_over: bool
    ) -> Ledger:
        """Returns the account after the weights became `base`: local work that was not merged is out of the model.

        A delta whose fate is not over stays in flight, by its id only.
        """
        delta = None if is_over or self.delta is None else replace(self.delta, decoded=None)
        return Ledger(version, digest, anchor, base, now, delta)
