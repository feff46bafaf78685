"""What a history comes to."""

from __future__ import annotations

import math

import pytest

from skerry_syncer.simulation.history import History, LearnerHistory, Round, cost
from skerry_syncer.simulation.scenario import Outage, Region, Scenario

LARGE, SMALL = Region("large", chip_count=300), Region("small", step_s=2.0, chip_count=100)


def history(*outages: Outage, large: float = 900.0, small: float = 450.0) -> History:
    learners = {
        "large": LearnerHistory(LARGE, 1000.0, 950, 20, large),
        "small": LearnerHistory(SMALL, 1000.0, 500, 0, small),
    }
    rounds = [Round(100.0, 1.0, (0, 2), {"large": large}), Round(900.0, 0.5, (1,), {"small": small})]
    return History(Scenario((LARGE, SMALL), 1000.0, outages=outages), learners, rounds)


def test_time_counts_by_chips_and_steps_that_may_still_be_merged_count_for_nothing() -> None:
    seen = history()
    assert seen.shares("large") == pytest.approx({"training": 0.95, "goodput": 900 / 980, "merged_step_count": 900})
    assert seen.shares("small") == pytest.approx({"training": 1.0, "goodput": 0.9, "merged_step_count": 450})
    assert seen.shares()["training"] == pytest.approx((3 * 0.95 + 1.0) / 4)
    assert seen.shares()["goodput"] == pytest.approx((3 * 900 + 2 * 450) / (3 * 980 + 1000))


def test_rounds_are_summarised_in_all_and_over_time() -> None:
    seen = history()
    summary = seen.summary()
    assert [summary[name] for name in ("participation", "staleness", "worst_staleness", "version_count")] == [
        0.75,
        1.0,
        2,
        2,
    ]
    rows = seen.over_time()
    assert sum(row["merged_step_count"] for row in rows) == 1350
    assert sum(row["goodput"] for row in rows) / len(rows) == pytest.approx((3 * 0.9 + 0.9) / 4)
    assert [row["participation"] for row in rows if not math.isnan(row["participation"])] == [1.0, 0.5]


def test_an_outage_costs_what_is_merged_less_and_others_are_told_apart() -> None:
    lost = cost(history(Outage("large", 0, 100), large=700, small=440), history())
    assert lost == {"merged_step_count": 210, "others_merged_step_count": 10}
