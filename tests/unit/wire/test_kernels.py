"""The compiled kernels write what NumPy writes, bit for bit, whatever the values and wherever blocks end."""

from __future__ import annotations

import builtins
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from types import ModuleType
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
from skerry.wire.frames import Frame, decode_frames, encode_frames, open_frame, parse_frames
from skerry.wire.kernels import load
from skerry.wire.quantise import quantised_squared_norms
from tests.unit.wire.wire_strategies import LARGEST, block_encodings, encodings, fragments

Fragment = tuple[FragmentLayout, NDArray[np.float32]]
KERNELS = load()
pytestmark = pytest.mark.skipif(KERNELS is None, reason="numba can't be imported")


def with_kernels(kernels: ModuleType | None, work: Callable[[], Any]) -> Any:
    """Returns what `work` returns, done by these kernels, or by NumPy."""
    with ExitStack() as patches:
        patches.enter_context(patch.object(quantise, "_kernels_for_norms", lambda *arrays: kernels))
        for module in (quantise, step_module, rebase):
            patches.enter_context(patch.object(module, "kernels_for", lambda *arrays: kernels))
        return work()


def encoded(values: NDArray[np.float32], layout: FragmentLayout, encoding: Encoding) -> tuple[bytes, bytes, bytes]:
    """Returns the frames, what the sender is told, and what a receiver decodes."""
    told, received = values.copy(), np.full_like(values, np.nan)
    data = b"".join(encode_frames(told, layout, encoding, decoded=told))
    decode_frames(data, layout, received)
    return data, told.tobytes(), received.tobytes()


@given(fragments(), block_encodings)
def test_frames_and_values_are_those_of_numpy(fragment: Fragment, encoding: Encoding) -> None:
    layout, values = fragment
    work = lambda: encoded(values, layout, encoding)  # noqa: E731 - done twice
    assert with_kernels(KERNELS, work) == with_kernels(None, work)


@given(fragments(), block_encodings, st.integers(0, 2**32 - 1))
def test_a_difference_is_encoded_in_place_as_by_numpy(fragment: Fragment, encoding: Encoding, seed: int) -> None:
    layout, values = fragment
    base = np.random.default_rng(seed).permutation(values)
    with np.errstate(over="ignore", invalid="ignore"):
        difference = base - values

    def in_place() -> object:
        told = values.copy()
        try:
            return b"".join(encode_frames(told, layout, encoding, base=base, decoded=told)), told.tobytes()
        except NonFiniteError as error:
            return str(error)

    def apart() -> object:
        try:
            return encoded(difference, layout, encoding)[:2]
        except NonFiniteError as error:
            return str(error)

    with np.errstate(over="ignore", invalid="ignore"):
        assert with_kernels(KERNELS, in_place) == with_kernels(None, in_place) == with_kernels(None, apart)


@given(fragments(), st.integers(0, 2**32 - 1))
def test_a_shift_is_that_of_numpy(fragment: Fragment, seed: int) -> None:
    _, anchor = fragment
    generator = np.random.default_rng(seed)
    base, in_flight = generator.permutation(anchor), generator.permutation(anchor)
    ledger = Ledger(0, b"", base, base, in_flight=in_flight)

    def work() -> object:
        out = np.full_like(anchor, np.nan)
        assert ledger.shift(anchor, is_merged=True, out=out) is out
        return out.tobytes()

    with np.errstate(over="ignore", invalid="ignore"):
        assert with_kernels(KERNELS, work) == with_kernels(None, work) == (anchor - base + in_flight).tobytes()


@given(st.sampled_from([Codec.INT8, Codec.INT4]), st.integers(0, 2**32 - 1), st.integers(1, 1500))
def test_any_bits_are_encoded_or_refused_alike(codec: Codec, seed: int, block: int) -> None:
    generator = np.random.default_rng(seed)
    shapes = ((3, 333), (2, 1), (1, 700))
    layout = FragmentLayout("f", tuple(TensorSpec(f"t{index}", shape) for index, shape in enumerate(shapes)))
    values = generator.integers(0, 2**32, layout.numel, dtype=np.uint32).view(np.float32)
    # Most of what is drawn so is within the codec, and one in some draws is not.
    values = np.where(np.abs(values) <= LARGEST, values, np.float32(LARGEST))
    odd = generator.integers(0, layout.numel)
    values[odd] = generator.choice([LARGEST, -0.0, np.nan, np.inf, -np.inf, 2.0**-149, np.nextafter(LARGEST, np.inf)])
    encoding = Encoding(codec, block=block, vector_codec=codec)

    def work() -> object:
        try:
            return encoded(values, layout, encoding)
        except NonFiniteError as error:
            return str(error)

    with np.errstate(invalid="ignore", over="ignore"):
        assert with_kernels(KERNELS, work) == with_kernels(None, work)


@pytest.mark.parametrize("codec", [Codec.INT8, Codec.INT4])
def test_every_code_and_tie_is_numpys(codec: Codec) -> None:
    top = {Codec.INT8: 127, Codec.INT4: 7}[codec]
    ties = np.arange(-2 * top * 64, 2 * top * 64 + 1, dtype=np.float32) / 128
    around = np.concatenate([np.nextafter(ties, np.float32(side)) for side in (-np.inf, np.inf)])
    powers = np.ldexp(np.float32(1.5), np.arange(-160, 1)).astype(np.float32)
    values = np.concatenate([[np.float32(top)], ties, around, powers, -powers]).clip(-top, top).astype(np.float32)
    layout = FragmentLayout("f", (TensorSpec("t", (1, len(values))),))
    encoding = Encoding(codec, block=2**15)
    work = lambda: encoded(values, layout, encoding)  # noqa: E731 - done twice
    assert with_kernels(KERNELS, work) == with_kernels(None, work)


@given(fragments(), block_encodings, st.data())
def test_values_are_accumulated_and_subtracted_as_by_numpy(
    fragment: Fragment, encoding: Encoding, data: st.DataObject
) -> None:
    layout, values = fragment
    generator = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    coefficients = generator.uniform(-1, 1, (2, len(layout.tensors))).astype(np.float32)
    delta = b"".join(encode_frames(values, layout, encoding))

    def work() -> tuple[bytes, bytes]:
        acc, weights = np.full_like(values, np.nan), values[::-1].copy()
        accumulate(acc, parse_frames(delta), layout, coefficients[0], is_first=True)
        accumulate(acc, parse_frames(delta), layout, coefficients[1], is_first=False)
        subtract_update(apart := np.full_like(values, np.nan), delta, layout, source=weights)
        subtract_update(weights, delta, layout)
        assert weights.tobytes() == apart.tobytes()
        return acc.tobytes(), weights.tobytes()

    with np.errstate(over="ignore", invalid="ignore"):
        assert with_kernels(KERNELS, work) == with_kernels(None, work)


def outcome_of_step(layout: FragmentLayout, acc: NDArray[np.float32], encoding: Encoding, seed: int) -> object:
    """Returns everything that a step of a made-up state writes and says, or its error."""
    generator = np.random.default_rng(seed)
    rate, momentum, decay, gain = generator.uniform(0.1, 1, 4).astype(np.float32)
    tensor_scales = generator.uniform(0, 1, len(layout.tensors)).astype(np.float32)
    scalars = Scalars(rate, momentum, tensor_scales, tensor_scales[None], decay, gain)
    state = OuterState(acc[::-1].copy(), acc * np.float32(0.5), np.roll(acc, 1) * np.float32(0.125), 0)
    step, done = Step(layout, scalars, encoding, state, acc), list[object]()
    try:
        for span in step_spans(layout, encoding):
            done += [advance_span(step, span).frames]
    except NonFiniteError as error:
        return str(error)
    return [*done, state.weights.tobytes(), state.momentum.tobytes(), state.residual.tobytes()]


@given(fragments(), encodings, st.integers(0, 2**32 - 1))
def test_the_outer_step_is_that_of_numpy(fragment: Fragment, encoding: Encoding, seed: int) -> None:
    work = lambda: outcome_of_step(*fragment, encoding, seed)  # noqa: E731 - done twice
    with np.errstate(over="ignore", invalid="ignore"):
        assert with_kernels(KERNELS, work) == with_kernels(None, work)


@pytest.mark.parametrize("codec", [Codec.INT8, Codec.INT4])
@pytest.mark.parametrize("block", [64, 255, 20_000])
@pytest.mark.parametrize("odd", [None, 3, 60_000], ids=["within", "beyond-early", "beyond-late"])
def test_a_step_in_several_pieces_is_that_of_numpy(codec: Codec, block: int, odd: int | None) -> None:
    shapes = ((3, 333), (2, 1), (1, 16_384), (7, 5001), (4999,), (1, 1), (3, 10_001))
    layout = FragmentLayout("f", tuple(TensorSpec(f"t{index}", shape) for index, shape in enumerate(shapes)))
    acc = np.random.default_rng(block).standard_normal(layout.numel).astype(np.float32)
    if odd is not None:
        acc[odd] = np.inf
    work = lambda: outcome_of_step(layout, acc, Encoding(codec, block=block), 1)  # noqa: E731 - done twice
    with np.errstate(over="ignore", invalid="ignore"):
        assert with_kernels(KERNELS, work) == with_kernels(None, work)


def opened_norms(frame: Frame, layout: FragmentLayout) -> tuple[NDArray[np.float64], bytes]:
    """Returns the squared norms of what a frame holds, and its raw bytes."""
    scratch = np.empty(frame.numel, np.float32)
    blocks, raw = open_frame(frame, layout, scratch)
    norms = quantised_squared_norms(frame.codec, raw, blocks, layout=layout, first=frame.first, scratch=scratch)
    return norms, raw.tobytes()


@given(fragments(), block_encodings, st.sampled_from([16, 64, codecs.MAX_FRAME_NUMEL]))
def test_norms_of_codes_are_those_of_the_values(fragment: Fragment, encoding: Encoding, frame_numel: int) -> None:
    layout, values = fragment
    encoding = replace(encoding, block=min(encoding.block, frame_numel))
    with patch.object(codecs, "MAX_FRAME_NUMEL", frame_numel):
        frames = list(parse_frames(b"".join(encode_frames(values, layout, encoding))))

    def work() -> tuple[NDArray[np.float64], tuple[bytes, ...]]:
        norms, raw = zip(*(opened_norms(frame, layout) for frame in frames), strict=True)
        return np.sum(norms, axis=0), raw

    (of_codes, raw), (of_values, same) = with_kernels(KERNELS, work), with_kernels(None, work)
    np.testing.assert_allclose(of_codes, of_values, rtol=1e-6, atol=0)
    assert raw == same


@pytest.mark.parametrize("codec", [Codec.INT8, Codec.INT4])
def test_the_largest_block_has_a_norm(codec: Codec) -> None:
    layout = FragmentLayout("f", (TensorSpec("t", (2, 65535)),))
    values = np.full(layout.numel, 3, np.float32)
    frames = parse_frames(b"".join(encode_frames(values, layout, Encoding(codec, block=65535))))
    norms = np.sum([opened_norms(frame, layout)[0] for frame in frames], axis=0)
    np.testing.assert_allclose(norms, [9 * layout.numel], rtol=1e-6)


@pytest.mark.parametrize("kernels", [KERNELS, None], ids=["kernels", "numpy"])
@given(fragments(), block_encodings, st.integers(0, 2**32 - 1))
def test_neither_spans_nor_frames_change_a_version(
    kernels: ModuleType | None, fragment: Fragment, encoding: Encoding, seed: int
) -> None:
    layout, acc = fragment
    acc = acc.clip(-1e3, 1e3)
    encoding = replace(encoding, block=min(encoding.block, 16))
    generator = np.random.default_rng(seed)
    rate, momentum, decay, gain = generator.uniform(0.1, 1, 4).astype(np.float32)
    scales = generator.uniform(0.1, 1, len(layout.tensors)).astype(np.float32)
    step_scalars = Scalars(rate, momentum, scales, scales[None], decay, gain)
    first = OuterState(acc[::-1].copy(), acc * np.float32(0.5), np.roll(acc, 1) * np.float32(0.125), 0)

    of_element = np.repeat(scales, [tensor.numel for tensor in layout.tensors])
    d = acc * of_element
    buf = first.momentum * decay + d * gain
    target = first.residual + (d + buf * momentum) * rate
    q = np.empty_like(target)
    list(encode_frames(target, layout, encoding, decoded=q))
    expected = [first.weights - q, buf, target - q]

    def small() -> list[list[NDArray[np.float32]]]:
        states = [OuterState(first.weights.copy(), first.momentum.copy(), first.residual.copy(), 0) for _ in range(2)]
        merged, replayed = (Step(layout, step_scalars, encoding, state, acc) for state in states)
        sent = np.full_like(acc, np.nan)
        for span in step_spans(layout, encoding):
            advanced = advance_span(merged, span)
            piece = sent[span.first : span.stop]
            decode_frames(b"".join(advanced.frames), layout, piece, first=span.first)
            assert advance_span(replayed, span, packs=False, published=sent).first_difference is None
        np.testing.assert_array_equal(sent.view(np.uint32), q.view(np.uint32))
        return [_arrays(state) for state in states]

    with ExitStack() as patches:
        patches.enter_context(patch.object(codecs, "MAX_FRAME_NUMEL", 16))
        patches.enter_context(patch.object(step_module, "SPAN_NUMEL", 64))
        for arrays in with_kernels(kernels, small):
            for actual, wanted in zip(arrays, expected, strict=True):
                np.testing.assert_array_equal(actual.view(np.uint32), wanted.view(np.uint32))


def _arrays(state: OuterState) -> list[NDArray[np.float32]]:
    return [state.weights, state.momentum, state.residual]


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
