"""A delta that turns the weights to another direction is warned of."""

from __future__ import annotations

import numpy as np
import pytest

from skerry.model.movement import warn_of_turn


@pytest.mark.parametrize("numel", [2048, 2**20])
def test_weights_that_turn_to_another_direction_are_warned_of(numel: int, caplog: pytest.LogCaptureFixture) -> None:
    base, others = np.random.default_rng(0).standard_normal((2, numel), np.float32)
    assert warn_of_turn(base - others, base)
    assert "If a checkpoint was loaded after attaching" in caplog.text
    for trained in (base + others, base + 20 * others, 1e-3 * others, 0 * base):
        assert not warn_of_turn(base - trained, base)
    assert not warn_of_turn(others, 0 * base)
    assert not warn_of_turn((base - others)[:1000], base[:1000])
    assert len(caplog.records) == 1
