"""What commands print as JSON."""

from __future__ import annotations

from skerry.cli.console import json_line


def test_a_number_that_is_not_finite_is_null() -> None:
    assert json_line({"losses": [float("nan"), float("inf"), 1.5], "region": "ü"}) == (
        '{"losses":[null,null,1.5],"region":"\\u00fc"}'
    )
