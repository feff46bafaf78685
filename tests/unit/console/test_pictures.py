"""What the pictures are drawn from."""

from __future__ import annotations

import math

import numpy as np

from skerry.v1 import types_pb2 as v1
from skerry_console.pictures import (
    curve_columns,
    curves,
    items,
    mark_columns,
    round_columns,
    version_cells,
    version_columns,
)
from tests.support.recorded_run import event, learner, round_events, rounds, started


def test_a_loss_that_is_not_finite_leaves_a_gap_and_judges_have_curves_of_their_own() -> None:
    report = v1.MetricsReport(position=4, judge="eval", metrics={"held-out": 1.5}, run_step_count=24)
    history = started(
        event(1.0, learner=learner(step_count=1, loss=2.0)),
        event(2.0, learner=learner(step_count=2, loss=math.nan)),
        event(3.0, metrics_reported=report),
    )
    drawn = {name: curve_columns(series) for name, series in curves(history).items()}
    assert drawn["loss us"]["value"] == [2.0]
    assert drawn["metric eval/held-out"] == {"time": [3000.0], "step": [24.0], "tokens": [0.0], "value": [1.5]}


def test_the_map_has_a_cell_a_version_and_room_for_more() -> None:
    history = started(*rounds(2, "us", "eu"))
    columns = version_columns(history)
    (image,) = columns["contributors"]
    assert image[0, :2].tolist() == [2.0, 2.0]
    assert np.isnan(image[0, 2:]).all()
    assert image.shape[1] >= 64
    assert version_cells(history.versions, {"head": 0}) == [[0, 1, 2, 0, 1500], [0, 2, 2, 0, 1500]]


def test_the_map_begins_with_the_oldest_version_that_is_known() -> None:
    history = started(*round_events(4100, 100.0, "us"), *round_events(4101, 110.0, "us"))
    columns = version_columns(history)
    assert columns["x"] == [4099.5]
    assert columns["contributors"][0].shape == (1, 64)
    assert columns["contributors"][0][0, :2].tolist() == [1.0, 1.0]


def test_a_round_is_a_bar_with_what_it_waited_for() -> None:
    columns = round_columns(started(*round_events(1, 100.0, "us", "eu")))
    bar = [columns[name][0] for name in ("opened", "closed", "committed", "waited", "last")]
    assert bar == [100_000.0, 102_000.0, 102_500.0, 2.0, "eu"]


def test_an_empty_run_has_pictures() -> None:
    assert set(items(started())) == {"losses", "version-map", "rounds"}


def test_what_goes_is_marked_and_what_comes_is_not() -> None:
    came = v1.LearnerStatus(learner_id="eu", is_live=True)
    history = started(
        *round_events(1, 100.0, "us"),
        event(103.0, 14, learner=came),
        event(104.0, 15, learner=v1.LearnerStatus(learner_id="us", has_left=True)),
        event(105.0, 16, ejection_changed=v1.EjectionChanged(learner_id="eu", is_ejected=True)),
    )
    history.note("the replica drains", 106.0)
    marks = mark_columns(history)
    assert sorted(marks["text"]) == ["eu was ejected", "the replica drains", "us has finished"]
    assert sorted(marks["time"]) == [104_000.0, 105_000.0, 106_000.0]
