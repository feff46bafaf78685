"""What one fragment's exchange is doing: the states, and the functions that lead from one to the next.

    state          event                                                  function        next state
    -------------  -----------------------------------------------------  --------------  ----------
    Idle           a delta of an earlier session waits to be merged       `behind`        InFlight
    Idle           a copy of the weights was encoded                      `taken`         Sending
    Sending        a push begins                                          `tried`         Sending
    Sending        the syncer has the delta in its log                    `acknowledged`  InFlight
    Sending        the syncer will never accept it, or its bytes          `refused`       Idle
    Sending        the run was closed                                     `returned`      Idle
    InFlight       news of the delta's fate                               `acknowledged`  InFlight
    InFlight       the delta will never be merged                         `returned`      Idle
    InFlight       a version was adopted that holds the delta             `adopted`       Idle
    InFlight       a version was adopted that does not hold it            `adopted`       InFlight
    InFlight       an earlier session's delta is in the version loaded    `adopted`       Idle
    Idle           a version was adopted                                  `adopted`       Idle
    any            the weights were set back to the version they had      `restored`      the same

A state has the ledger of the fragment's weights, so that both change together. States are values: any thread may read
the one that is current.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from skerry.algorithm.rebase import FlatArray, Ledger, Trained
from skerry.exchange.push import Delta
from skerry.v1 import exchange_pb2, types_pb2

# Fates after which a delta's work is unsent again.
_RETURNING: Final = frozenset({types_pb2.FATE_EXPIRED, types_pb2.FATE_SUPERSEDED})


@dataclass(frozen=True)
class Idle:
    """Nothing is on its way. The next delta is due H steps after `contributed_step`."""

    ledger: Ledger
    contributed_step: int
    must_adopt: bool = False  # the last delta was refused: the newest version is adopted before its work is sent
    used_base: int = -1  # the syncer has a delta of this session from this version, and takes no second one
    # Where versions come faster than steps, every adoption meets a newer version: a delta that is due goes first then.
    is_turn_to_send: bool = False


@dataclass(frozen=True)
class Sending:
    """A delta that the syncer has not acknowledged. The same bytes are repeated until it does."""

    ledger: Ledger
    delta: Delta
    contributed_step: int  # of the delta before
    was_tried: bool = False  # the syncer may have some of it, or all


@dataclass(frozen=True)
class InFlight:
    """An acknowledged delta, without its bytes, that no adopted version holds."""

    ledger: Ledger
    delta: Delta
    contributed_step: int  # of the delta before
    fate: types_pb2.DeltaFate

    @property
    def is_pending(self) -> bool:
        """Whether its fate may still change."""
        return self.fate.fate == types_pb2.FATE_PENDING

    @property
    def is_merged(self) -> bool:
        """Whether a version has it."""
        return self.fate.fate == types_pb2.FATE_MERGED

    @property
    def is_loaded(self) -> bool:
        """Whether it is an earlier session's, and in the version that this session loaded.

        A rank that loads its fragments after the first rank has attached is told of such a delta as pending.
        """
        return self.is_merged and not self.delta.is_own and self.fate.version <= self.ledger.version

    @property
    def is_returned(self) -> bool:
        """Whether its work is to be sent again."""
        return self.fate.fate in _RETURNING

    @property
    def is_quarantined(self) -> bool:
        """Whether its work is not plausible."""
        return self.fate.fate == types_pb2.FATE_QUARANTINED


State: TypeAlias = Idle | Sending | InFlight


def behind(state: Idle, fate: types_pb2.DeltaFate) -> InFlight:
    """The delta is an earlier session's: one of this session would supersede it, and the run would lose its work."""
    delta = Delta(exchange_pb2.PushHeader(delta_id=fate.delta_id), (), last_step=state.contributed_step)
    return InFlight(state.ledger, delta, state.contributed_step, fate)


def taken(state: Idle, delta: Delta, decoded: FlatArray, now: Trained) -> Sending:
    """The delta, which its receiver decodes as `decoded`, holds all work up to `now`."""
    return Sending(state.ledger.sent(decoded, now), delta, state.contributed_step)


def tried(state: Sending) -> Sending:
    """A push has begun."""
    return replace(state, was_tried=True)


def acknowledged(state: Sending | InFlight, fate: types_pb2.DeltaFate) -> InFlight:
    """The delta is in the log, with this fate; the first fate that is final stands."""
    if isinstance(state, Sending):
        return InFlight(state.ledger, replace(state.delta, parts=()), state.contributed_step, fate)
    return replace(state, fate=fate) if state.is_pending else state


def refused(state: Sending, *, is_base_used: bool) -> Idle:
    """The delta was never accepted; `is_base_used`: because the syncer has another one from the same base."""
    ledger = state.ledger.returned()
    used_base = ledger.version if is_base_used else -1
    return Idle(ledger, state.contributed_step, must_adopt=True, used_base=used_base)


def returned(state: Sending | InFlight) -> Idle:
    """The delta will not be merged; its base may be used again."""
    return Idle(state.ledger.returned(), state.contributed_step)


def adopted(state: Idle | InFlight, ledger: Ledger, *, is_merged: bool) -> Idle | InFlight:
    """The weights are at the version of `ledger`; `is_merged`: it holds the delta in flight."""
    if isinstance(state, Idle):
        return Idle(ledger, state.contributed_step, used_base=state.used_base, is_turn_to_send=True)
    return Idle(ledger, state.delta.last_step, is_turn_to_send=True) if is_merged else replace(state, ledger=ledger)


def restored(state: State, base: FlatArray, now: Trained) -> State:
    """The weights became `base` again: all local work is out of the model, in whatever state the delta is."""
    return replace(state, ledger=state.ledger.restored(base, now))
