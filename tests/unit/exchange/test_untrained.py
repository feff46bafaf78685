"""Which frozen parameters may differ from the run's."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from skerry.exchange.untrained import may_differ


@pytest.mark.parametrize("allowed", [True, ["base.bias"], ("unknown", "base.*"), "base.bias"])
def test_a_frozen_parameter_may_differ_by_its_name_or_a_pattern(*, allowed: bool | Collection[str]) -> None:
    assert may_differ("base.bias", allowed=allowed)


@pytest.mark.parametrize("allowed", [False, ["base.weight", "base"], []])
def test_others_may_not(*, allowed: bool | Collection[str]) -> None:
    assert not may_differ("base.bias", allowed=allowed)
