"""What a learner's process trained, sent and heard: the account that the auditor holds the log against."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from skerry.errors import SkerryError
from skerry.v1 import exchange_pb2, types_pb2


@dataclass(eq=False)
class LearnerRecord:
    """What one process of a learner trained, sent and heard; none of it is read from the log."""

    learner: str
    incarnation: int
    session: str = ""
    # Sum of all steps' vectors up to step n, by tensor: [n] is (numel,) float64; [0] is zero.
    work: dict[str, list[NDArray[np.float64]]] = field(default_factory=dict)
    step_count: int = 0
    headers: dict[str, exchange_pb2.PushHeader] = field(default_factory=dict)  # by delta: as first pushed
    acknowledged: dict[str, int] = field(default_factory=dict)  # delta -> count of events when it was heard
    fates: dict[str, types_pb2.DeltaFate] = field(default_factory=dict)  # the last that was heard
    is_newest: bool = True
    has_left: bool = False
    failed_flush_count: int = 0  # in the middle of training
    has_flushed: bool = False  # before it left: everything that it trained was acknowledged
    is_dirty: bool = False  # its weights were poisoned, so contents are not checked
    may_be_fenced: bool = False  # the learner has had several sessions, and an old one's hello may come late
    failure: SkerryError | None = None
    longest_stall_s: float = 0.0
    steps_when_calm: int | None = None  # trained when the faults stopped
    contradictions: list[str] = field(default_factory=list)

    def note_hello(self, session: str) -> None:
        """Notes the session that an attach stream opens with."""
        self.may_be_fenced |= self.session not in ("", session)
        self.session = session

    def note_header(self, header: exchange_pb2.PushHeader) -> None:
        """Notes a push as it was first sent; initial weights are not noted."""
        if header.base_version >= 0:
            self.headers.setdefault(header.delta_id, header)

    def note_fate(self, fate: types_pb2.DeltaFate, count: Callable[[], int]) -> None:
        """Notes what was heard of a delta of this process."""
        if fate.delta_id not in self.headers:
            return
        self.acknowledged.setdefault(fate.delta_id, count())
        known = self.fates.get(fate.delta_id)
        if known is not None and types_pb2.FATE_PENDING not in {known.fate, fate.fate}:
            if (known.fate, known.version) != (fate.fate, fate.version):
                self.contradictions.append(f"two final fates of one delta were heard. delta={fate.delta_id}")
            return
        if known is None or known.fate == types_pb2.FATE_PENDING:
            self.fates[fate.delta_id] = fate


def fates_in_answer(
    response: exchange_pb2.PushDeltaResponse | exchange_pb2.QueryPushResponse,
) -> Iterator[types_pb2.DeltaFate]:
    """Yields what the answer to a push says of it."""
    if response.state == exchange_pb2.PUSH_STATE_ACCEPTED:
        yield response.fate


def fates_in_news(response: exchange_pb2.AttachResponse) -> Iterator[types_pb2.DeltaFate]:
    """Yields the fates in a message of the attach stream."""
    if response.HasField("attached"):
        yield from response.attached.pending
        return
    event = response.event
    match event.WhichOneof("kind"):
        case "delta_accepted":
            yield event.delta_accepted
        case "version_committed":
            yield from event.version_committed.merged
        case "fates_decided":
            yield from event.fates_decided.fates
