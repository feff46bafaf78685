"""Digests say the same on every machine, and something else for everything else."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from blake3 import blake3

from skerry.wire.digests import LEAF_NUMEL, LeafHash, delta_digest, part_digest, tree_digest, tree_leaves, tree_root


def test_a_parts_digest_is_sha256_of_its_raw_bytes_in_order() -> None:
    hasher = part_digest()
    hasher.update(b"ab")
    hasher.update(memoryview(b"c"))
    assert hasher.digest() == hashlib.sha256(b"abc").digest()


def test_a_deltas_digest_names_each_parts_place() -> None:
    first, second = bytes(range(32)), bytes(range(32, 64))
    expected = hashlib.sha256(
        b"skerry.delta.v1\0" + struct.pack("<QQ", 0, 7) + first + struct.pack("<QQ", 7, 2**40) + second
    ).digest()
    assert delta_digest([(0, 7, first), (7, 2**40, second)]) == expected
    assert delta_digest([(7, 2**40, second), (0, 7, first)]) == expected
    assert delta_digest([(0, 7, second), (7, 2**40, first)]) != expected
    assert delta_digest([(0, 6, first), (7, 2**40, second)]) != expected


def test_parts_that_overlap_or_have_no_digest_have_no_deltas_digest() -> None:
    with pytest.raises(ValueError, match="follows"):
        delta_digest([(0, 7, bytes(32)), (6, 1, bytes(32))])
    with pytest.raises(ValueError, match="follows"):
        delta_digest([(0, 7, bytes(31))])


_ONE_SHOT: dict[LeafHash, Callable[[bytes], bytes]] = {
    LeafHash.SHA256: lambda data: hashlib.sha256(data).digest(),
    LeafHash.BLAKE3: lambda data: blake3(data).digest(),
}


@pytest.mark.parametrize("leaf_hash", LeafHash)
@pytest.mark.parametrize("numel", [0, 1, LEAF_NUMEL, LEAF_NUMEL + 1])
def test_a_tree_digest_is_over_leaves_of_a_mebi_elements(numel: int, leaf_hash: LeafHash) -> None:
    values = np.arange(numel, dtype=np.float32)
    one_shot = _ONE_SHOT[leaf_hash]
    leaves = [one_shot(values[low : low + LEAF_NUMEL].tobytes()) for low in range(0, numel, LEAF_NUMEL)]
    expected = hashlib.sha256(b"skerry.tree.v1\0" + struct.pack("<Q", numel) + b"".join(leaves)).digest()
    assert tree_digest(values, leaf_hash) == expected
    assert list(tree_leaves(values, leaf_hash)) == leaves
    assert tree_root(numel, leaves) == expected


def test_a_tree_digest_tells_zeros_apart_and_orders() -> None:
    values = np.array([0.0, 1.0], np.float32)
    digests = {tree_digest(array, LeafHash.SHA256) for array in (values, -values, values[::-1].copy(), values[:1])}
    assert len(digests) == 4


def test_arrays_whose_bytes_are_not_the_values_in_order_are_refused() -> None:
    values = np.zeros(8, np.float32)
    wrongs: list[Any] = [values[::2], values.reshape(2, 4), values.astype(np.float64), values.astype(">f4")]
    for wrong in wrongs:
        with pytest.raises(ValueError, match="contiguous"):
            tree_digest(wrong, LeafHash.SHA256)
    with pytest.raises(ValueError, match="leaves"):
        tree_root(LEAF_NUMEL, [])
