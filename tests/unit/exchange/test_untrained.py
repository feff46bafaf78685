"""Which frozen parameters may differ from the run's."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from skerry.exchange.untrained import may_differ


@pytest.mark.parametrize(
    ("allowed", "may"),
    [
        (True, True),
        (False, False),
        (["base.bias"], True),
        (("unknown", "base.*"), True),
        ({"*bias"}, True),
        ("base.bias", True),
        (["base.weight"], False),
        (["base"], False),
        ([], False),
    ],
)
def test_a_frozen_parameter_may_differ_by_its_name_or_a_pattern(allowed: bool | Collection[str], *, may: bool) -> None:
    assert may_differ("base.bias", allowed=allowed) == may
