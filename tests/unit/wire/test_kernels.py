"""The compiled kernels write what NumPy writes, bit for bit, whatever the values and wherever blocks end."""

from __future__ import annotations

import builtins
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from skerry.algorithm import rebase
from skerry.algorithm import step as step_module
from skerry.algorithm.rebase import Ledger
from skerry.algorithm.step import (
    OuterState,
    Scalars,
    Step,
    accumulate,
    advance_span,
    step_spans,
    subtract_update,
)
from skerry.wire import Codec, Encoding, FragmentLayout, NonFiniteError, TensorSpec, codecs, quantise
from skerry.wire.frames import encode_frames, open_frame, parse_frames
from skerry.wire.kernels import load
from skerry.wire.quantise import per_tensor_squared_norms, quantised_squared_norms
from tests.support.decoding import decode_frames
from tests.unit.wire.wire_strategies import LARGEST, block_encodings, encodings, fragments

Fragment = tuple[FragmentLayout, NDArray[np.float32]]
KERNELS = load()
pytestmark = pytest.mark.skipif(KERNELS is None, reason="numba can't be imported")
seeds = st.integers(0, 2**32 - 1)


def done_by_both(work: Callable[[], Any]) -> Any:
    """Returns what `work` returns or refuses, once the kernels and NumPy have done the same."""
    results = []
    for kernels in (KERNELS, None):
        with ExitStack() as patches, np.errstate(over="ignore", invalid="ignore"):
            for module in (quantise, step_module, rebase):
                patches.enter_context(patch.object(module, "kernels_for", lambda *_, kernels=kernels: kernels))
            try:
                results.append(work())
            except NonFiniteError as error:
                results.append(str(error))
    assert results[0] == results[1]
    return results[0]


def check_encoding(values: NDArray[np.float32], layout: FragmentLayout, encoding: Encoding) -> None:
    """Compares the frames, what the sender is told, and what a receiver decodes."""

    def work() -> tuple[bytes, bytes, bytes]:
        told, received = values.copy(), np.full_like(values, np.nan)
        data = b"".join(encode_frames(told, layout, encoding, decoded=told))
        decode_frames(data, layout, received)
        return data, told.tobytes(), received.tobytes()

    done_by_both(work)


def layout_of(*shapes: tuple[int, ...]) -> FragmentLayout:
    return FragmentLayout("f", tuple(TensorSpec(f"t{index}", shape) for index, shape in enumerate(shapes)))


@given(fragments(), block_encodings)
def test_frames_and_values_are_those_of_numpy(fragment: Fragment, encoding: Encoding) -> None:
    layout, values = fragment
    check_encoding(values, layout, encoding)


@given(st.sampled_from([Codec.INT8, Codec.INT4]), seeds, st.integers(1, 1500))
def test_any_bits_are_encoded_or_refused_alike(codec: Codec, seed: int, block: int) -> None:
    generator = np.random.default_rng(seed)
    layout = layout_of((3, 333), (2, 1), (1, 700))
    values = generator.integers(0, 2**32, layout.numel, dtype=np.uint32).view(np.float32)
    # Most of what is drawn so is within the codec, and one in some draws is not.
    values = np.where(np.abs(values) <= LARGEST, values, np.float32(LARGEST))
    odd = generator.integers(0, layout.numel)
    values[odd] = generator.choice([LARGEST, -0.0, np.nan, np.inf, -np.inf, 2.0**-149, np.nextafter(LARGEST, np.inf)])
    check_encoding(values, layout, Encoding(codec, block=block, vector_codec=codec))


@pytest.mark.parametrize("codec", [Codec.INT8, Codec.INT4])
def test_every_code_and_tie_is_numpys(codec: Codec) -> None:
    top = codec.top_code
    ties = np.arange(-2 * top * 64, 2 * top * 64 + 1, dtype=np.float32) / 128
    around = np.concatenate([np.nextafter(ties, np.float32(side)) for side in (-np.inf, np.inf)])
    powers = np.ldexp(np.float32(1.5), np.arange(-160, 1)).astype(np.float32)
    values = np.concatenate([[np.float32(top)], ties, around, powers, -powers]).clip(-top, top).astype(np.float32)
    check_encoding(values, layout_of((1, len(values))), Encoding(codec, block=2**15))


@given(fragments(), seeds)
def test_a_shift_is_that_of_numpy(fragment: Fragment, seed: int) -> None:
    _, anchor = fragment
    generator = np.random.default_rng(seed)
    base, in_flight = generator.permutation(anchor), generator.permutation(anchor)
    ledger = Ledger(0, b"", base, base, in_flight=in_flight)
    done_by_both(lambda: ledger.shift(anchor, is_merged=True, out=np.empty_like(anchor)).tobytes())


@given(fragments(), block_encodings, seeds)
def test_values_are_accumulated_and_subtracted_as_by_numpy(fragment: Fragment, encoding: Encoding, seed: int) -> None:
    layout, values = fragment
    coefficients = np.random.default_rng(seed).uniform(-1, 1, (2, len(layout.tensors))).astype(np.float32)
    delta = b"".join(encode_frames(values, layout, encoding))

    def work() -> tuple[bytes, bytes]:
        acc, weights = np.full_like(values, np.nan), values[::-1].copy()
        accumulate(acc, parse_frames(delta), layout, coefficients[0], is_first=True)
        accumulate(acc, parse_frames(delta), layout, coefficients[1], is_first=False)
        subtract_update(apart := np.full_like(values, np.nan), delta, layout, source=weights)
        subtract_update(weights, delta, layout)
        assert weights.tobytes() == apart.tobytes()
        return acc.tobytes(), weights.tobytes()

    done_by_both(work)


def check_norms(values: NDArray[np.float32], layout: FragmentLayout, encoding: Encoding) -> None:
    """Compares the norms of codes with those of the values that they stand for."""
    decoded, norms = np.empty_like(values), np.zeros(len(layout.tensors))
    data = b"".join(encode_frames(values, layout, encoding, decoded=decoded))
    with patch.object(quantise, "_kernels_for_norms", lambda _: KERNELS):
        for frame in parse_frames(data):
            scratch = np.full(frame.numel, np.nan, np.float32)
            blocks, raw = open_frame(frame, layout, scratch)
            quantised_squared_norms(
                frame.codec, raw, blocks, layout=layout, first=frame.first, scratch=scratch, norms=norms
            )
    np.testing.assert_allclose(norms, per_tensor_squared_norms(decoded, layout, 0), rtol=1e-6, atol=0)


@given(fragments(), block_encodings, st.sampled_from([16, 64, codecs.MAX_FRAME_NUMEL]))
def test_norms_of_codes_are_those_of_the_values(fragment: Fragment, encoding: Encoding, frame_numel: int) -> None:
    layout, values = fragment
    with patch.object(codecs, "MAX_FRAME_NUMEL", frame_numel):
        check_norms(values, layout, replace(encoding, block=min(encoding.block, frame_numel)))


@pytest.mark.parametrize("codec", [Codec.INT8, Codec.INT4])
def test_the_largest_block_has_a_norm(codec: Codec) -> None:
    layout = layout_of((2, 65535))
    check_norms(np.full(layout.numel, 3, np.float32), layout, Encoding(codec, block=65535))


def made_up_step(layout: FragmentLayout, acc: NDArray[np.float32], encoding: Encoding, seed: int) -> Step:
    generator = np.random.default_rng(seed)
    rate, momentum, decay, gain = generator.uniform(0.1, 1, 4).astype(np.float32)
    tensor_scales = generator.uniform(0.1, 1, len(layout.tensors)).astype(np.float32)
    scalars = Scalars(rate, momentum, tensor_scales, tensor_scales[None], decay, gain)
    state = OuterState(acc[::-1].copy(), acc * np.float32(0.5), np.roll(acc, 1) * np.float32(0.125), 0)
    return Step(layout, scalars, encoding, state, acc)


def contents(state: OuterState) -> list[bytes]:
    return [array.tobytes() for array in (state.weights, state.momentum, state.residual)]


def check_step(layout: FragmentLayout, acc: NDArray[np.float32], encoding: Encoding, seed: int) -> None:
    """Compares everything that a step writes and says."""

    def work() -> object:
        step = made_up_step(layout, acc, encoding, seed)
        advanced = [advance_span(step, span) for span in step_spans(layout, encoding)]
        return [span.frames for span in advanced], contents(step.state)

    done_by_both(work)


@given(fragments(), encodings, seeds)
def test_the_outer_step_is_that_of_numpy(fragment: Fragment, encoding: Encoding, seed: int) -> None:
    with np.errstate(over="ignore"):
        check_step(*fragment, encoding, seed)


@pytest.mark.parametrize("codec", [Codec.INT8, Codec.INT4])
@pytest.mark.parametrize("block", [64, 255, 20_000])
@pytest.mark.parametrize("odd", [None, 3, 60_000], ids=["within", "beyond-early", "beyond-late"])
def test_a_step_in_several_pieces_is_that_of_numpy(codec: Codec, block: int, odd: int | None) -> None:
    layout = layout_of((3, 333), (2, 1), (1, 16_384), (7, 5001), (4999,), (1, 1), (3, 10_001))
    acc = np.random.default_rng(block).standard_normal(layout.numel).astype(np.float32)
    if odd is not None:
        acc[odd] = np.inf
    check_step(layout, acc, Encoding(codec, block=block), 1)


@given(fragments(), block_encodings, seeds)
def test_neither_spans_nor_frames_change_a_version(fragment: Fragment, encoding: Encoding, seed: int) -> None:
    layout, acc = fragment
    acc = acc.clip(-1e3, 1e3)
    encoding = replace(encoding, block=min(encoding.block, 16))
    step = made_up_step(layout, acc, encoding, seed)
    scalars, before = step.scalars, step.state
    d = acc * np.repeat(scalars.tensor_scales, layout.sizes)
    buf = before.momentum * scalars.decay + d * scalars.gain
    target: Any = before.residual + (d + buf * scalars.momentum) * scalars.rate
    q = np.empty_like(target)
    list(encode_frames(target, layout, encoding, decoded=q))
    after = OuterState(before.weights - q, buf, target - q, 0)

    def work() -> object:
        merged, replayed = (made_up_step(layout, acc, encoding, seed) for _ in range(2))
        sent = np.full_like(acc, np.nan)
        for span in step_spans(layout, encoding):
            frames = b"".join(advance_span(merged, span).frames)
            decode_frames(frames, layout, sent[span.first : span.stop], first=span.first)
            assert advance_span(replayed, span, packs=False).frames == ()
        assert contents(merged.state) == contents(replayed.state)
        return sent.tobytes(), contents(merged.state)

    with patch.object(codecs, "MAX_FRAME_NUMEL", 16), patch.object(step_module, "SPAN_NUMEL", 64):
        assert done_by_both(work) == (q.tobytes(), contents(after))


@pytest.mark.parametrize(("error", "warns"), [(ImportError("no numba"), False), (RuntimeError("no compiler"), True)])
def test_without_a_compiler_that_works_numpy_does_the_work(error: Exception, *, warns: bool) -> None:
    imported = builtins.__import__

    def failing(name: str, *rest: Any, **more: Any) -> Any:
        if name == "skerry.wire":
            raise error
        return imported(name, *rest, **more)

    with patch.object(builtins, "__import__", failing), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert load.__wrapped__() is None
    assert bool(said) is warns
