"""A delta that goes many times as far as those before it is not training."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from skerry.errors import StopExchangingError
from skerry.model.movement import Moves

BASE = np.full(100, -1.0, np.float32)


def vector(size: float) -> Any:
    return np.full(100, size, np.float32)


def checked(*deltas: tuple[float, int]) -> Moves:
    moves = Moves()
    for size, step_count in deltas:
        moves.check(vector(size), BASE, step_count=step_count)
    return moves


def test_a_delta_that_jumps_stops_the_exchange() -> None:
    moves = checked((0.01, 2), (-0.02, 2))  # 0.005 and 0.01 a step
    with pytest.raises(StopExchangingError, match=r"moved_per_step=0\.16, largest_before=0\.01, steps=2") as caught:
        moves.check(vector(-0.32), BASE, step_count=2)
    assert caught.value.reason == "WEIGHTS_REPLACED"


@pytest.mark.parametrize(
    "last",
    [
        (0.31, 2),  # 15.5 times as far a step
        (0.32, 4),  # as far in twice the steps
        (0.29, 1),  # 29 times as far, and too little for other weights
        (3.01, 1),  # too far for other weights: the run refuses what diverges
    ],
)
def test_a_faster_round_is_training(last: tuple[float, int]) -> None:
    checked((0.02, 2), last)


def test_a_first_delta_and_one_after_standing_still_may_go_anywhere_in_a_small_vector() -> None:
    checked((5.0, 1))
    checked((0.0, 1), (5.0, 1))
    checked((9e-5, 1), (9e-5, 1), (0.9, 1))


def test_a_round_is_compared_with_the_last_eight() -> None:
    checked((0.5, 1), *[(0.02, 1)] * 7, (0.4, 1))
    moves = checked((0.5, 1), *[(0.02, 1)] * 8)
    with pytest.raises(StopExchangingError):
        moves.check(vector(0.4), BASE, step_count=1)


def test_weights_that_turn_to_another_direction_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    base, others = np.random.default_rng(0).standard_normal((2, 2048), np.float32)
    moves = Moves()
    for _ in range(2):
        moves.check(base - others, base, step_count=1)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "If a checkpoint was loaded after attaching" in caplog.text
    for trained in (base + others, base + 20 * others, 1e-3 * others, 0 * base):
        Moves().check(base - trained, base, step_count=1)
    Moves().check(others, 0 * base, step_count=1)
    assert len(caplog.records) == 1


def test_large_vectors_are_looked_at_in_strides() -> None:
    moves, base = Moves(), np.ones(2**20, np.float32)
    moves.check(base * np.float32(0.01), base, step_count=1)
    with pytest.raises(StopExchangingError):
        moves.check(base * np.float32(0.5), base, step_count=1)
