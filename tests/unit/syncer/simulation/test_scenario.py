"""Markets that give and take a region's capacity."""

from __future__ import annotations

from itertools import pairwise
from statistics import median

import pytest

from skerry_syncer.simulation.scenario import YEAR_S, Region, spot_outages


def test_a_market_is_like_the_trace_that_it_is_fitted_to() -> None:
    outages = list(spot_outages("us", 4 * YEAR_S, seed=0))
    ups = [after.start_s - before.end_s for before, after in pairwise(outages)]
    assert median(ups) / 3600 == pytest.approx(0.54, rel=0.05)
    assert median(outage.duration_s for outage in outages) / 3600 == pytest.approx(0.49, rel=0.05)
    away_s = sum(outage.duration_s for outage in outages)
    assert 1 - away_s / (4 * YEAR_S) == pytest.approx(0.64, abs=0.06)


def test_a_market_follows_from_seed_and_region() -> None:
    first = list(spot_outages("us", 86_400, seed=0))
    assert first == list(spot_outages("us", 86_400, seed=0))
    assert first not in (list(spot_outages("us", 86_400, seed=1)), list(spot_outages("eu", 86_400, seed=0)))


def test_learners_of_a_region_are_numbered() -> None:
    assert Region("us").learners == ["us"]
    assert Region("us", count=2).learners == ["us-1", "us-2"]
