"""One version, with numbers that are checked by hand."""

from __future__ import annotations

import numpy as np
import pytest

from skerry.algorithm.step import (
    OuterState,
    Scalars,
    Span,
    Step,
    accumulate,
    advance_span,
    step_spans,
    subtract_update,
)
from skerry.wire import Codec, Encoding, FragmentLayout, NonFiniteError, TensorSpec
from skerry.wire.frames import encode_frames, parse_frames

LAYOUT = FragmentLayout("f", (TensorSpec("w", (1, 2)), TensorSpec("b", (1,))))
INT4 = Encoding(Codec.INT4, block=2)  # vectors as float32


def floats(*values: float) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return np.array(values, np.float32)


def merged() -> Step:
    """Returns a step of two members, ready to be taken."""
    acc = floats(np.nan, np.nan, np.nan)
    coefficients = np.array([[0.5, 1], [0.25, 1]], np.float32)  # [member][tensor]
    for member, values in enumerate((floats(2, 4, 1), floats(1, -1, 2))):
        frames = b"".join(encode_frames(values, LAYOUT, Encoding(Codec.FLOAT32)))
        accumulate(acc, parse_frames(frames), LAYOUT, coefficients[member], is_first=member == 0)
    # w: 0.5 * (2, 4) + 0.25 * (1, -1), b: 1 + 2
    assert acc.tolist() == [1.25, 1.75, 3]
    scalars = Scalars(
        rate=np.float32(0.5),
        momentum=np.float32(0.5),
        tensor_scales=floats(2, 1),
        coefficients=coefficients,
        decay=np.float32(0.5),
        gain=np.float32(1),
    )
    state = OuterState(floats(10, 10, 10), floats(1, 0, 2), floats(1.5, -1.375, 0), version=3)
    return Step(LAYOUT, scalars, INT4, state, acc)


def test_a_step_is_the_recurrence_of_the_module() -> None:
    step = merged()
    advance_span(step, Span(0, 3))
    # d = (2.5, 3.5, 3), buf = 0.5 (1, 0, 2) + d
    assert step.state.momentum.tolist() == [3, 3.5, 4]
    # target = residual + 0.5 (d + 0.5 buf) = (3.5, 1.25, 2.5); scale 0.5, codes 7 and 2, since 2.5 is a tie
    assert step.state.weights.tolist() == [6.5, 9, 7.5]
    assert step.state.residual.tolist() == [0, 0.25, 0]


def test_an_update_takes_a_learners_weights_where_the_syncers_are() -> None:
    step = merged()
    update = b"".join(advance_span(step, Span(0, 3)).frames)
    before = floats(10, 10, 10)
    apart = floats(np.nan, np.nan, np.nan)
    subtract_update(apart, update, LAYOUT, source=before)
    subtract_update(before, update, LAYOUT)
    assert before.tolist() == apart.tolist() == step.state.weights.tolist()


def test_a_step_out_of_the_codecs_range_names_its_element() -> None:
    step = merged()
    step.acc[1] = np.inf
    with pytest.raises(NonFiniteError, match="tensor=w, element=1"):
        advance_span(step, Span(0, 3))


def test_spans_are_cut_where_blocks_begin() -> None:
    leaf = 2**20
    layout = FragmentLayout("f", (TensorSpec("b", (3,)), TensorSpec("w", (1, 2 * leaf))))
    # Blocks of w begin at 3, 259, ...: the last one at or before 2^20 is at 2^20 - 253.
    spans = step_spans(layout, Encoding(Codec.INT4, block=256))
    assert spans == [(0, leaf - 253), (leaf - 253, 2 * leaf - 253), (2 * leaf - 253, 2 * leaf + 3)]
    assert step_spans(layout, Encoding(Codec.FLOAT32)) == [(0, leaf), (leaf, 2 * leaf), (2 * leaf, 2 * leaf + 3)]
