"""The ledger: whatever becomes of deltas, every step's work is sent once, in flight, or unsent."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from numpy.typing import NDArray

from skerry.algorithm.rebase import UNTRAINED, Ledger, Trained
from skerry.model.interface import ArrayParameters
from skerry.wire import Codec, Encoding, FragmentLayout, TensorSpec
from skerry.wire.frames import encode_frames
from tests.support.decoding import decode_frames

Values = NDArray[np.float32]
LAYOUT = FragmentLayout("f", (TensorSpec("w", (4, 8)), TensorSpec("b", (3,))))
INT4 = Encoding(codec=Codec.INT4, block=16)
seeds = st.integers(0, 2**32 - 1)


def whole_numbers(seed: int, largest: int) -> Values:
    """Whole numbers: sums of them are exact in float32, so that equations may be tested for equality."""
    return np.random.default_rng(seed).integers(-largest, largest + 1, LAYOUT.numel).astype(np.float32)


def unsent(ledger: Ledger, weights: NDArray[np.float32]) -> NDArray[np.float32]:
    """Equation (2): the work that is in no delta."""
    in_flight = np.float32(0) if ledger.in_flight is None else ledger.in_flight
    left: NDArray[np.float32] = ledger.base - in_flight - weights
    return left


class Account(RuleBasedStateMachine):
    """One fragment of one learner, in every order of training, sending, fates and adoption."""

    element_type: type = np.float32

    def __init__(self) -> None:
        super().__init__()
        rng = np.random.default_rng(0)
        self.arrays = {"w": rng.integers(-9, 9, (4, 8)), "b": rng.integers(-9, 9, 3)}
        self.parameters = ArrayParameters({n: a.astype(self.element_type) for n, a in self.arrays.items()})
        anchor = self.weights()
        self.ledger = Ledger(0, b"0", anchor, anchor)
        self.is_exact = self.parameters.is_float32(LAYOUT)
        self.trained = UNTRAINED
        self.work = np.zeros(LAYOUT.numel, np.float32)  # all local steps: base minus weights is positive work
        self.merged = np.zeros(LAYOUT.numel, np.float32)
        self.merged_steps: list[tuple[int, int]] = []

    def weights(self) -> Values:
        buffer = self.parameters.buffer(LAYOUT)
        self.parameters.snapshot(LAYOUT, buffer)()
        return buffer

    @rule(seed=seeds, tokens=st.integers(1, 9))
    def train(self, seed: int, tokens: int) -> None:
        before = self.weights()
        self.parameters.add(LAYOUT, whole_numbers(seed, 5))()
        self.work += before - self.weights()
        self.trained = Trained(self.trained.step_count + 1, self.trained.token_count + tokens)

    @precondition(lambda self: self.ledger.in_flight is None and self.trained != self.ledger.sent_until)
    @rule()
    def send_a_coarse_half(self) -> None:
        half = np.trunc(unsent(self.ledger, self.weights()) / 2)
        self.ledger = self.ledger.sent(half, self.trained)

    @precondition(lambda self: self.ledger.in_flight is not None)
    @rule()
    def learn_that_it_was_refused_or_expired(self) -> None:
        self.ledger = self.ledger.returned()

    @rule(seed=seeds, is_merged=st.booleans())
    def adopt(self, seed: int, is_merged: bool) -> None:
        ledger = self.ledger
        is_merged = is_merged and ledger.in_flight is not None
        if is_merged and ledger.in_flight is not None:
            self.merged += ledger.in_flight
            self.merged_steps.append((ledger.in_flight_since.step_count, ledger.sent_until.step_count))
        anchor = self.ledger.anchor + whole_numbers(seed, 30)
        before = self.weights()
        self.parameters.add(LAYOUT, self.ledger.shift(anchor, is_merged=is_merged))()
        base = anchor
        if not self.is_exact:
            base = self.ledger.rounded_base(before, self.weights(), is_merged=is_merged)
        self.ledger = self.ledger.rebased(self.ledger.version + 1, b"", anchor, base, is_merged=is_merged)

    @invariant()
    def all_work_is_merged_in_flight_or_unsent(self) -> None:
        in_flight = np.float32(0) if self.ledger.in_flight is None else self.ledger.in_flight
        np.testing.assert_array_equal(self.merged + in_flight + unsent(self.ledger, self.weights()), self.work)

    @invariant()
    def every_step_is_in_one_delta_or_none(self) -> None:
        spans = [*self.merged_steps]
        if self.ledger.in_flight is not None:
            spans.append((self.ledger.in_flight_since.step_count, self.ledger.sent_until.step_count))
        spans.append((self.ledger.sent_until.step_count, self.trained.step_count))
        steps = [step for begin, end in spans for step in range(begin, end)]
        assert sorted(steps) == list(range(self.trained.step_count))

    @invariant()
    def weights_follow_the_anchor(self) -> None:
        """A model that rounds coarsely stays within one rounding of where exact arithmetic would have it."""
        if not self.is_exact:
            drift = np.abs(self.ledger.base - self.ledger.anchor)
            assert np.all(drift <= np.spacing(np.abs(self.weights()).astype(np.float16)).astype(np.float32))


class RoundingAccount(Account):
    """The same where the model holds float16: adoption rounds, and that is nobody's work."""

    element_type = np.float16


_SETTINGS = settings(max_examples=40, stateful_step_count=30)
TestLedger = Account.TestCase
TestLedger.settings = _SETTINGS
TestLedgerOfRoundingWeights = RoundingAccount.TestCase
TestLedgerOfRoundingWeights.settings = _SETTINGS


def test_what_quantisation_drops_is_sent_later_without_a_buffer_of_its_own() -> None:
    rng = np.random.default_rng(1)
    anchor = rng.normal(size=LAYOUT.numel).astype(np.float32)
    weights, ledger, received = anchor.copy(), Ledger(0, b"", anchor, anchor), np.zeros(LAYOUT.numel, np.float32)
    local = np.zeros(LAYOUT.numel, np.float32)
    for step in range(1, 40):
        change = rng.normal(scale=0.01, size=LAYOUT.numel).astype(np.float32)
        weights -= change
        local += change
        decoded = np.empty_like(weights)
        frames = b"".join(encode_frames(weights, LAYOUT, INT4, base=ledger.base, decoded=decoded))
        check = np.empty_like(decoded)
        decode_frames(frames, LAYOUT, check)
        np.testing.assert_array_equal(check, decoded)
        ledger = ledger.sent(decoded, Trained(step, step))
        received += decoded
        new_anchor = ledger.anchor - decoded
        weights += ledger.shift(new_anchor, is_merged=True)
        ledger = ledger.rebased(step, b"", new_anchor, new_anchor, is_merged=True)
    # 39 deltas of 4 bits each, and yet no more is missing than one quantisation drops.
    assert np.abs(received - local).max() < 0.01


def test_after_a_replacement_a_refused_delta_brings_nothing_back() -> None:
    anchor = np.zeros(LAYOUT.numel, np.float32)
    ledger = Ledger(0, b"", anchor, anchor).sent(np.ones(LAYOUT.numel, np.float32), Trained(5, 50))
    ledger = ledger.restored(anchor, Trained(9, 90))
    ledger = ledger.returned()
    assert ledger.sent_until == Trained(9, 90)
    np.testing.assert_array_equal(unsent(ledger, anchor), anchor)
