"""With error feedback nothing is lost in the sum of what is sent."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from numpy.typing import NDArray

from skerry.wire import Codec, Encoding, FragmentLayout, TensorSpec, decode_frames
from skerry.wire.error_feedback import encode_with_feedback, restored
from tests.wire.wire_strategies import block_encodings, fragments


@given(fragments(), block_encodings)
def test_the_receiver_gets_what_was_meant_up_to_the_residual(
    fragment: tuple[FragmentLayout, NDArray[np.float32]], encoding: Encoding
) -> None:
    layout, values = fragment
    delta, residual, received = values.copy(), np.zeros_like(values), np.empty_like(values)
    frames = encode_with_feedback(delta, residual, layout, encoding)
    decode_frames(b"".join(frames), layout, received)
    assert (delta == received).all()
    assert (residual == values - received).all()


def test_what_one_message_drops_a_later_one_brings() -> None:
    layout = FragmentLayout("f", (TensorSpec("a", (16, 128)),))
    generator = np.random.default_rng(0)
    step = (generator.standard_normal(layout.numel) * 1e-3).astype(np.float32)
    residual = np.zeros_like(step)
    with_feedback, without = np.zeros(layout.numel), np.zeros(layout.numel)
    rounds = 50
    for _ in range(rounds):
        delta = step.copy()
        encode_with_feedback(delta, residual, layout, Encoding(Codec.INT4))
        with_feedback += delta
        plain, nothing = step.copy(), np.zeros_like(step)
        encode_with_feedback(plain, nothing, layout, Encoding(Codec.INT4))
        without += plain
    meant = rounds * step.astype(np.float64)
    assert np.abs(with_feedback - meant).max() < 1.5e-3
    assert np.abs(without - meant).max() > 10 * np.abs(with_feedback - meant).max()


def test_a_refused_message_leaves_all_of_it_to_be_sent() -> None:
    layout = FragmentLayout("f", (TensorSpec("a", (1, 8)),))
    meant = np.linspace(-1, 1, 8, dtype=np.float32)
    delta, residual = meant.copy(), np.zeros(8, np.float32)
    encode_with_feedback(delta, residual, layout, Encoding(Codec.INT4))
    np.testing.assert_allclose(restored(residual, delta), meant, rtol=1e-6)


def test_arrays_that_do_not_match_are_left_alone() -> None:
    layout = FragmentLayout("f", (TensorSpec("a", (1, 8)),))
    delta, residual = np.ones(8, np.float32), np.ones(7, np.float32)
    with pytest.raises(ValueError, match="shape"):
        encode_with_feedback(delta, residual, layout, Encoding(Codec.INT4))
    assert (delta == 1).all()
