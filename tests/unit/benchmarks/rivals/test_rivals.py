"""A synchronisation of rivals counts only if something was exchanged."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.rivals.__main__ import rows
from benchmarks.rivals.peers import model
from benchmarks.rivals.turns import Found, check


def _samples(*changes: np.ndarray[tuple[int], np.dtype[np.float32]]) -> list[dict[str, list[float]]]:
    return [{"sample": (model.STEP_SIZE * change).tolist()} for change in changes]


def test_learners_that_averaged_have_synchronised() -> None:
    one, two = np.random.default_rng(0).standard_normal((2, 1000))
    check(_samples(one, two), _samples((one + two) / 2, (one + two) / 2))


def test_learners_that_exchanged_nothing_are_no_result() -> None:
    one, two = np.random.default_rng(0).standard_normal((2, 1000))
    with pytest.raises(RuntimeError, match="did not synchronise"):
        check(_samples(one, two), _samples(one, two))
    with pytest.raises(RuntimeError, match="did not synchronise"):
        check(_samples(one, one), _samples(one, one))


def test_the_limit_of_a_time_is_what_the_link_needs_for_the_bytes() -> None:
    found = {"skerry": Found([2.0], [125e6], [1.0]), "torchft": Found([4.0], [250e6], [1.0])}
    by_metric = {(row.case, row.metric.partition(" /")[0]): row for row in rows("1gbit", found)}
    assert by_metric["Skerry, 4 bits both ways", "full synchronisation"].ratio == 2.0
    against = by_metric["Skerry against torchft DiLoCo, float32", "full synchronisation"]
    assert (against.value, against.limit, against.ratio) == (2.0, 4.0, 0.5)
