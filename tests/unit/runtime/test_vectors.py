"""The memory of a fragment's vectors: used again once nothing refers to them, and given up as soon as that is so."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from skerry import ArrayLearner
from skerry.runtime import vectors
from skerry.runtime.vectors import vector
from tests.support.quadratic import QUICK

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


def held_vectors() -> int:
    return sum(type(one) is vectors._Lease for one in gc.get_objects())


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


def test_few_vectors_are_kept() -> None:
    held = [vector(NUMEL) for _ in range(2 * vectors._MOST_KEPT)]
    held.clear()
    assert len(vectors._kept) == vectors._MOST_KEPT


def test_between_adoptions_a_learner_holds_an_anchor_and_a_delta_of_each_fragment(target: str) -> None:
    fragments = 3
    arrays = {f"matrix{number}": np.ones((256, NUMEL // 256), np.float32) for number in range(fragments)}
    policy = replace(QUICK, inner_step_count=64)  # more than the steps after the flush
    noise, before = np.random.default_rng(0), held_vectors()
    options: dict[str, Any] = {
        "target": target,
        "run": "fit",
        "create": True,
        "policy": policy,
        "fragment_count": fragments,
    }
    with ArrayLearner(arrays, learner_id="a", **options) as learner:
        while min(learner.stats.versions.values()) < 4:
            for array in arrays.values():
                np.add(array, noise.normal(0, 0.01, array.shape), out=array, casting="same_kind")
            learner.step(tokens=1)
        assert learner.flush(30)
        for _ in range(QUICK.inner_step_count, policy.inner_step_count):  # what was merged last is adopted
            learner.step(tokens=1)
            time.sleep(0.02)
        assert fragments <= held_vectors() - before <= 2 * fragments
