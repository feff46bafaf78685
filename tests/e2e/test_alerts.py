"""docker/alerts.yml, evaluated by Prometheus' own tool over series that were written by hand."""

from __future__ import annotations

import pytest

from tests.e2e.machine import ROOT, need_programs, run

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


def test_each_alert_fires_when_it_should_and_is_quiet_otherwise() -> None:
    need_programs({"promtool": "prometheus"})
    assert "SUCCESS" in run(["promtool", "test", "rules", ROOT / "tests/e2e/alerts_test.yml"], timeout_s=120)
