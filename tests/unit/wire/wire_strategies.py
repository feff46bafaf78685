"""Layouts, values and encodings for property tests, weighted towards where codecs go wrong."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from skerry.wire import Codec, Compressor, Encoding, FragmentLayout, TensorSpec

shapes = st.one_of(
    st.tuples(),
    st.tuples(st.integers(0, 40)),
    st.tuples(st.integers(1, 9), st.integers(0, 40)),
    st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 7)),
)

layouts = st.lists(shapes, min_size=1, max_size=8).map(
    lambda shapes: FragmentLayout("f", tuple(TensorSpec(f"t{i}", shape) for i, shape in enumerate(shapes)))
)

encodings = st.builds(
    Encoding,
    codec=st.sampled_from(Codec),
    block=st.sampled_from([1, 2, 3, 7, 8, 16, 128]),
    vector_codec=st.sampled_from(Codec),
    compressor=st.sampled_from(Compressor),
)

block_encodings = st.builds(
    Encoding,
    codec=st.sampled_from([Codec.INT8, Codec.INT4]),
    block=st.sampled_from([1, 2, 3, 8]),
    vector_codec=st.sampled_from([Codec.INT8, Codec.INT4]),
)

LARGEST = 2.0**127
_exponents = st.integers(-150, 126)  # subnormals included


@st.composite
def values_of(draw: st.DrawFn, numel: int) -> NDArray[np.float32]:
    """Values of one magnitude, of all magnitudes, of few values (ties, zero blocks), or at the format's ends."""
    kind = draw(st.sampled_from(["one magnitude", "all magnitudes", "few values", "ends"]))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    if kind == "one magnitude":
        return np.ldexp(generator.uniform(-1, 1, numel), draw(_exponents)).astype(np.float32)
    if kind == "all magnitudes":
        return np.ldexp(generator.uniform(-1, 1, numel), generator.integers(-150, 127, numel)).astype(np.float32)
    if kind == "few values":
        unit = math.ldexp(1.0, draw(st.integers(-148, 120)))
        return (generator.choice([0.0, -0.0, 0.5, 1.5, 2.5, -3.5, 7.0, 127.0, 2**-6, -(2**-7)], numel) * unit).astype(
            np.float32
        )
    return generator.choice([0.0, LARGEST, -LARGEST, 2.0**-126, 2.0**-149, -(2.0**-127), 1.0], numel).astype(np.float32)


@st.composite
def fragments(draw: st.DrawFn) -> tuple[FragmentLayout, NDArray[np.float32]]:
    """Return a layout that has at least one element, and values for all of it."""
    layout = draw(layouts.filter(lambda layout: layout.numel > 0))
    return layout, draw(values_of(layout.numel))


def bits(values: NDArray[np.float32]) -> NDArray[np.uint32]:
    """Return the values' bits, so that comparing tells -0.0 from 0.0."""
    return values.view(np.uint32)
