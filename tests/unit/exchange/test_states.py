"""The states of one fragment's exchange, and what leads from one to the next."""

from __future__ import annotations

import numpy as np
import pytest

from skerry.algorithm.rebase import Ledger, Trained
from skerry.exchange.push import Delta, Part
from skerry.exchange.states import (
    Idle,
    InFlight,
    Sending,
    State,
    acknowledged,
    adopted,
    refused,
    restored,
    taken,
)
from skerry.v1 import exchange_pb2, types_pb2

ANCHOR = np.zeros(3, np.float32)
WORK = np.ones(3, np.float32)
IDLE = Idle(Ledger(4, b"4", ANCHOR, ANCHOR, sent_until=Trained(20, 200)), contributed_step=20)
DELTA = Delta(exchange_pb2.PushHeader(delta_id="d"), (Part(0, 3, b"", (b"bytes",)),), taken_at_s=1.0, last_step=30)
SENDING = taken(IDLE, DELTA, WORK, Trained(30, 300))
PENDING = acknowledged(SENDING, types_pb2.DeltaFate(delta_id="d", fate=types_pb2.FATE_PENDING))
MERGED = types_pb2.DeltaFate(delta_id="d", fate=types_pb2.FATE_MERGED, version=5)
NEXT = IDLE.ledger.rebased(5, b"5", ANCHOR, ANCHOR, is_merged=True)


def test_a_delta_that_is_sent_keeps_its_bytes_until_it_is_acknowledged() -> None:
    assert SENDING.delta.parts
    assert PENDING.delta.parts == ()
    assert PENDING.delta.header.delta_id == "d"
    assert PENDING.ledger == SENDING.ledger


def test_the_first_final_fate_stands() -> None:
    merged = acknowledged(PENDING, MERGED)
    assert not merged.is_pending
    assert acknowledged(merged, types_pb2.DeltaFate(delta_id="d", fate=types_pb2.FATE_EXPIRED)) is merged


def test_adopting_what_a_delta_was_merged_into_ends_it_and_the_next_is_due_h_steps_after_it() -> None:
    assert adopted(acknowledged(PENDING, MERGED), NEXT, is_merged=True) == Idle(NEXT, 30, is_turn_to_send=True)


def test_adopting_another_version_keeps_the_delta_in_flight() -> None:
    ledger = PENDING.ledger.rebased(5, b"5", ANCHOR, ANCHOR, is_merged=False)
    after = adopted(PENDING, ledger, is_merged=False)
    assert isinstance(after, InFlight)
    assert after.ledger.version == 5
    assert after.ledger.in_flight is WORK


@pytest.mark.parametrize("state", [IDLE, SENDING, PENDING, refused(SENDING, is_base_used=False)])
def test_weights_that_were_put_back_hold_no_work_in_any_state(state: State) -> None:
    after = restored(state, WORK, Trained(33, 330))
    assert type(after) is type(state)
    assert (after.ledger.version, after.ledger.in_flight, after.ledger.sent_until) == (4, None, Trained(33, 330))
    assert after.ledger.base is WORK
    if isinstance(after, Sending):
        assert refused(after, is_base_used=False).ledger.sent_until == Trained(33, 330), "nothing returns"
