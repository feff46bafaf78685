"""Squared norms per tensor."""

from __future__ import annotations

import tracemalloc

import numpy as np

from skerry.wire import FragmentLayout, TensorSpec
from skerry.wire.quantise import per_tensor_squared_norms

LAYOUT = FragmentLayout("f", (TensorSpec("a", (3, 100_000)), TensorSpec("b", (0,)), TensorSpec("c", (9,))))


def test_each_tensors_squares_are_summed_in_double_precision() -> None:
    values = np.random.default_rng(0).standard_normal(LAYOUT.numel).astype(np.float32)
    norms = per_tensor_squared_norms(values, LAYOUT)
    expected = [np.square(part.astype(np.float64)).sum() for part in np.split(values, [300_000, 300_000])]
    np.testing.assert_allclose(norms, expected, rtol=1e-13)
    assert norms.dtype == np.float64


def test_large_values_do_not_overflow_nor_small_ones_vanish() -> None:
    for size in (1e30, 1e-30):
        norms = per_tensor_squared_norms(np.full(LAYOUT.numel, size, np.float32), LAYOUT)
        np.testing.assert_allclose(norms, np.array([300_000, 0, 9]) * float(np.float32(size)) ** 2, rtol=1e-12)


def test_norms_of_disjoint_ranges_add_up() -> None:
    values = np.random.default_rng(1).standard_normal(LAYOUT.numel).astype(np.float32)
    cut = 123_457
    parts = per_tensor_squared_norms(values[:cut], LAYOUT) + per_tensor_squared_norms(values[cut:], LAYOUT, cut)
    np.testing.assert_allclose(parts, per_tensor_squared_norms(values, LAYOUT), rtol=1e-13)
    assert per_tensor_squared_norms(values[:cut], LAYOUT)[2] == 0


def test_no_copy_of_the_fragment_is_made() -> None:
    values = np.ones(LAYOUT.numel, np.float32)
    tracemalloc.start()
    per_tensor_squared_norms(values, LAYOUT)
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()
