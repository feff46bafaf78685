"""Which frozen parameters may differ from the run's, and how many of them a run records."""

from __future__ import annotations

import random
from collections.abc import Collection

import pytest

from skerry.exchange.untrained import may_differ, recorded
from skerry.wire.untrained import UntrainedTensor
from tests.support.heard_logs import heard_logs


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


def test_more_frozen_parameters_than_a_request_holds_are_not_recorded_and_that_is_said() -> None:
    draw = random.Random(0)
    many = [UntrainedTensor(draw.randbytes(24).hex(), (4, 4), "float32", draw.getrandbits(64)) for _ in range(70_000)]
    assert len(recorded(many[:45_000])) == 45_000
    with heard_logs() as logs:
        assert recorded(many) == []
    assert [line["tensors"] for line in logs] == [70_000]
