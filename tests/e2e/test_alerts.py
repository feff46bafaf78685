"""docker/alerts.yml, evaluated by Prometheus' own tool over series that were written by hand."""

from __future__ import annotations

import pytest

from tests.e2e.machine import ROOT, find, need_programs, need_root, run

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def promtool() -> str:
    """The path of Prometheus' tool, of Debian's package."""
    if find("promtool") is None:
        need_root()
    need_programs({"promtool": "prometheus"})
    found = find("promtool")
    assert found is not None
    return found


def test_each_alert_fires_when_it_should_and_is_quiet_otherwise(promtool: str) -> None:
    assert "SUCCESS" in run([promtool, "test", "rules", ROOT / "tests/e2e/alerts_test.yml"], timeout_s=120)
