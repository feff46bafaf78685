"""The one delta of a fragment that is on its way or in flight: made of a copy of the weights, sent until known."""

from __future__ import annotations

from dataclasses import dataclass

from skerry.algorithm.rebase import FlatArray, Ledger, Trained
from skerry.client.delta import EncodedDelta, digest_of, encode_delta
from skerry.client.session import Session
from skerry.v1 import exchange_pb2, types_pb2
from skerry.wire import FragmentLayout


@dataclass
class Outgoing:
    """The delta as it travels, and what is known of it."""

    encoded: EncodedDelta | None  # dropped once acknowledged: the same bytes are not needed again
    taken_at_s: float
    was_tried: bool = False
    refusal_count: int = 0
    fate: types_pb2.DeltaFate | None = None  # None: not acknowledged

    @property
    def final_fate(self) -> types_pb2.Fate.ValueType | None:
        """What became of the delta, once that is settled."""
        if self.fate is None or self.fate.fate == types_pb2.FATE_PENDING:
            return None
        return self.fate.fate


def make_delta(
    session: Session, layout: FragmentLayout, ledger: Ledger, weights: FlatArray, delta_id: str, *, trained: Trained
) -> tuple[EncodedDelta, FlatArray]:
    """Returns what is unsent at `weights` as a delta, and what its receiver will decode; for a worker.

    Raises:
        NonFiniteError: the weights, and so the delta, are not finite.
    """
    session.parameters.settle()
    unsent = ledger.unsent(weights)
    parts = encode_delta(
        session.parameters.encode, unsent, layout, session.policy.delta_encoding, session.part_size_bytes
    )
    header = exchange_pb2.PushHeader(
        run=session.settings.run,
        run_uid=session.run_uid,
        learner_id=session.settings.learner_id,
        session_id=session.session_id,
        delta_id=delta_id,
        fragment=layout.name,
        base_version=ledger.version,
        base_digest=ledger.digest,
        step_count=trained.step_count - ledger.sent_until.step_count,
        token_count=trained.token_count - ledger.sent_until.token_count,
        last_step=trained.step_count,
    )
    return EncodedDelta(header, parts, digest_of(parts)), unsent
