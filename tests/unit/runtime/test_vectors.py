"""The memory of a fragment's vectors: used again once nothing refers to them, and given up as soon as that is so."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from skerry.runtime import vectors
from skerry.runtime.vectors import vector

NUMEL = 2**17


@pytest.fixture(autouse=True)
def nothing_is_kept() -> Iterator[None]:
    gc.collect()
    gc.disable()
    vectors._kept.clear()
    yield
    gc.enable()


def address(array: NDArray[np.float32]) -> int:
    return int(array.__array_interface__["data"][0])


def test_memory_is_used_again_once_no_view_refers_to_it() -> None:
    first = vector(NUMEL)
    view, at = first[100:200].reshape(10, 10), address(first)
    del first
    second = vector(NUMEL)
    assert address(second) != at
    del view
    third = vector(NUMEL - 1000)
    assert (address(third), third.shape) == (at, (NUMEL - 1000,))
    second[:], third[:] = 1, 2
    assert second.sum() == NUMEL


def test_a_much_smaller_vector_does_not_take_a_large_ones_memory() -> None:
    first = vector(NUMEL)
    at = address(first)
    del first
    assert address(vector(NUMEL // 3)) != at
