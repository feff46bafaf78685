"""Digests say the same on every machine, and something else for everything else."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from blake3 import blake3

from skerry.wire.digests import LEAF_NUMEL, delta_digest, tree_digest, tree_leaves, tree_root


def test_a_deltas_digest_names_each_parts_place_in_any_order() -> None:
    first, second = bytes(32), bytes(range(32))
    digest = delta_digest([(0, 7, first), (7, 2**40, second)])
    assert delta_digest([(7, 2**40, second), (0, 7, first)]) == digest
    assert delta_digest([(0, 7, second), (7, 2**40, first)]) != digest
    assert delta_digest([(0, 6, first), (7, 2**40, second)]) != digest


def test_parts_that_overlap_or_have_no_digest_have_no_deltas_digest() -> None:
    with pytest.raises(ValueError, match="follows"):
        delta_digest([(0, 7, bytes(32)), (6, 1, bytes(32))])
    with pytest.raises(ValueError, match="follows"):
        delta_digest([(0, 7, bytes(31))])


@pytest.mark.parametrize("numel", [0, 1, LEAF_NUMEL, LEAF_NUMEL + 1])
def test_a_tree_digest_is_over_leaves_of_a_mebi_elements(numel: int) -> None:
    values = np.arange(numel, dtype=np.float32)
    leaves = [blake3(values[low : low + LEAF_NUMEL].tobytes()).digest() for low in range(0, numel, LEAF_NUMEL)]
    expected = blake3(b"skerry.tree.v1\0" + struct.pack("<Q", numel) + b"".join(leaves)).digest()
    assert tree_digest(values) == expected
    assert list(tree_leaves(values)) == leaves
    assert tree_root(numel, leaves) == expected


def test_a_tree_digest_tells_zeros_apart_and_orders() -> None:
    values = np.array([0.0, 1.0], np.float32)
    digests = {tree_digest(array) for array in (values, -values, values[::-1].copy(), values[:1])}
    assert len(digests) == 4


def test_arrays_whose_bytes_are_not_the_values_in_order_are_refused() -> None:
    values = np.zeros(8, np.float32)
    wrongs: list[Any] = [values[::2], values.reshape(2, 4), values.astype(np.float64), values.astype(">f4")]
    for wrong in wrongs:
        with pytest.raises(ValueError, match="contiguous"):
            tree_digest(wrong)
    with pytest.raises(ValueError, match="leaves"):
        tree_root(LEAF_NUMEL, [])
